"""`gmeta serve`: an exported model as a server."""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import typer

from gmeta.cli.commands import serve_options as options
from gmeta.cli.commands import server_options as shared
from gmeta.errors import UserError
from gmeta.platform.files.local_paths import is_url
from gmeta.serving.server.serve_config import ServeConfig
from gmeta.serving.server.server_limits import BatchLimits, RequestLimits

# The name stands in paths and in metrics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def serve(
    model: options.Model,
    listen: options.Listen = "127.0.0.1:8080",
    grpc: options.Grpc = "",
    name: options.Name = "",
    workers: options.Workers = 1,
    threads: options.Threads = 1,
    max_body: options.MaxBody = 16 << 20,
    max_rows: options.MaxRows = 10_000,
    extra: options.Extra = "refuse",
    max_waiting: options.MaxWaiting = 256,
    max_batch: options.MaxBatch = 64,
    max_connections: options.MaxConnections = 1_024,
    timeout: options.TimeoutS = 10.0,
    cache_bytes: options.CacheBytes = 256 << 20,
    cache_ttl: options.CacheTtl = 3_600.0,
    reload_every: options.ReloadEvery = 2.0,
    drain: options.Drain = 20.0,
    drain_delay: options.DrainDelay = 0.0,
    verify: options.Verify = True,
    access_log: options.AccessLog = True,
    tls_cert: shared.TlsCert = None,
    tls_key: shared.TlsKey = None,
    tls_client_ca: shared.TlsClientCa = None,
    tokens: shared.TokenFolder = None,
    insecure: shared.Insecure = False,
    behind_proxy: options.BehindProxy = False,
    log_level: shared.LogLevel = "INFO",
) -> None:
    """Answer the Open Inference Protocol with an exported model that adapts to each request's task.

    gmeta serve exports/clicks --insecure --grpc 127.0.0.1:8081

    gmeta serve clicks --listen 0.0.0.0:8080 --tls-cert tls.crt --tls-key tls.key --tokens tokens/

    gmeta serve s3://bucket/clicks/channel --listen 0.0.0.0:8080 --behind-proxy

    A newer export in the same folder, or version of the channel, is served as it comes. Runs until
    SIGTERM, then answers the requests under way and exits 0. Logs JSON lines to stderr, and prints
    the address of its page once it answers."""
    folder = model if is_url(model) else Path(model)
    name = name or Path(model).absolute().name
    _check(name)
    config = ServeConfig(
        folder=folder,
        name=name,
        listen=listen,
        grpc_listen=grpc,
        workers=workers,
        threads=threads,
        limits=RequestLimits(max_body, max_rows, extra == "ignore"),
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
    # Late: loading torch takes seconds, and a wrong option is reported at once.
    from gmeta.serving.server.server_processes import serve_until_signal
    from gmeta.serving.server.server_worker import run_worker

    def announce(port: int) -> None:
        # Whoever started it in a pipe that has ended sees neither the log.
        with suppress(OSError):
            typer.echo(f"Open {config.url(port)}/ in a browser: {name} answers.")

    raise typer.Exit(serve_until_signal(config, log_level, run_worker, announce))


def _check(name: str) -> None:
    # Looked for before torch is loaded, which takes seconds.
    for package in ("fastapi", "uvicorn", "httptools"):
        if find_spec(package) is None:
            raise UserError(f"gmeta serve needs the extra: pip install 'gmeta[serve]' ({package})")
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name is {name[:100]!r}; allowed are 1 to 100 letters, digits and . _ -, the first "
            "a letter or digit. Pass --name"
        )
