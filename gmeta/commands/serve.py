"""`gmeta serve`: an exported model as a server."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gmeta.commands.service_options import (
    LOG_LEVELS,
    Insecure,
    TlsCert,
    TlsClientCa,
    TlsKey,
    TokenFolder,
)
from gmeta.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # it stands in paths and in metrics


def serve(
    model: Annotated[Path, typer.Argument(help="folder that `gmeta export` wrote")],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT for HTTP; port 0 takes a free one")
    ] = "127.0.0.1:8080",
    grpc: Annotated[str, typer.Option(help="HOST:PORT for gRPC; empty for none")] = "",
    name: Annotated[
        str, typer.Option(help="name that callers use; default: the folder's own")
    ] = "",
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="processes that share addresses and tables")
    ] = 1,
    threads: Annotated[
        int, typer.Option(min=1, max=256, help="threads that each worker computes with")
    ] = 1,
    max_body: Annotated[
        int, typer.Option(min=1_000, max=1 << 30, help="bytes that a request may have")
    ] = 16 << 20,
    max_rows: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="rows that a request may have, both sides")
    ] = 10_000,
    max_waiting: Annotated[
        int, typer.Option(min=1, max=100_000, help="requests that may wait, each worker; then 429")
    ] = 256,
    max_batch: Annotated[
        int, typer.Option(min=1, max=1_024, help="requests that are answered at once")
    ] = 64,
    max_connections: Annotated[
        int, typer.Option(min=1, max=100_000, help="connections of each worker")
    ] = 1_024,
    timeout: Annotated[
        float, typer.Option(min=0.05, max=3_600, help="seconds that a request may take")
    ] = 10.0,
    cache_bytes: Annotated[
        int, typer.Option(min=0, help="bytes of adapted tasks that each worker keeps; 0: none")
    ] = 256 << 20,
    cache_ttl: Annotated[
        float, typer.Option(min=1, help="seconds that an adapted task is kept")
    ] = 3_600.0,
    reload_every: Annotated[
        float,
        typer.Option(min=0, max=3_600, help="seconds between looks for a newer model; 0: never"),
    ] = 2.0,
    drain: Annotated[
        float, typer.Option(min=0, max=3_600, help="seconds that requests under way may take")
    ] = 20.0,
    drain_delay: Annotated[
        float,
        typer.Option(min=0, max=600, help="seconds from SIGTERM, not ready, to the last request"),
    ] = 0.0,
    verify: Annotated[
        bool, typer.Option(help="check the model's checksums before use, which reads all of it")
    ] = True,
    access_log: Annotated[bool, typer.Option(help="log each inference")] = True,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    tokens: TokenFolder = None,
    insecure: Insecure = False,
    behind_proxy: Annotated[
        bool,
        typer.Option("--behind-proxy", help="no TLS and no proof: a proxy in front does both"),
    ] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR")] = "INFO",
) -> None:
    """Answer the Open Inference Protocol with an exported model that adapts to each request's task.

    gmeta serve models/clicks --insecure --grpc 127.0.0.1:8081

    gmeta serve clicks --listen 0.0.0.0:8080 --tls-cert tls.crt --tls-key tls.key --tokens tokens/

    A newer export in the same folder is served as it comes. Runs until SIGTERM, then answers the
    requests under way and exits 0. Logs JSON lines to stderr.
    """
    for package in ("fastapi", "uvicorn", "httptools"):
        if find_spec(package) is None:
            raise UserError(f"gmeta serve needs the extra: pip install 'gmeta[serve]' ({package})")
    if log_level.upper() not in LOG_LEVELS:
        raise UserError(
            f"--log-level is {log_level!r}; allowed are {', '.join(LOG_LEVELS)}. Correct it"
        )
    name = name or model.absolute().name
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name is {name[:100]!r}; allowed are 1 to 100 letters, digits and . _ -, the first "
            "a letter or digit. Pass --name"
        )
    # Loading torch takes seconds: not before the options are known to be right.
    from gmeta.server.config import ServeConfig
    from gmeta.server.limits import BatchLimits, RequestLimits
    from gmeta.server.process import serve_until_signal
    from gmeta.server.worker import run_worker

    config = ServeConfig(
        folder=model,
        name=name,
        listen=listen,
        grpc_listen=grpc,
        workers=workers,
        threads=threads,
        limits=RequestLimits(max_body, max_rows),
        batch=BatchLimits(max_waiting, max_batch, timeout_s=timeout),
        max_connections=max_connections,
        cache_bytes=cache_bytes,
        cache_ttl_s=cache_ttl,
        reload_every_s=reload_every,
        drain_s=drain,
        drain_delay_s=drain_delay,
        verify=verify,
        access_log=access_log,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        tokens=tokens,
        insecure=insecure,
        behind_proxy=behind_proxy,
    )
    config.check()
    raise typer.Exit(serve_until_signal(config, log_level, run_worker))
