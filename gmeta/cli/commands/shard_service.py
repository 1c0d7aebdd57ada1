"""`gmeta shard-service`: run the data-shard service."""

# No import of torch or the data layer: the service starts in well under a second.
from pathlib import Path
from typing import Annotated

import typer

from gmeta.access.address import DEFAULT_ADDRESS
from gmeta.access.log import configure_logging
from gmeta.access.protection import NOTHING
from gmeta.antdt.service.shard_server import ServiceConfig, ServiceStartError, serve_until_signal
from gmeta.antdt.stragglers.straggler_config import load_straggler_config
from gmeta.cli.commands import server_options as shared


def shard_service(
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to serve on; port 0 takes a free one")
    ] = DEFAULT_ADDRESS,
    store: Annotated[
        str,
        typer.Option(
            help="sqlite:///PATH survives anything; memory: survives nothing but a checkpoint"
        ),
    ] = "sqlite:///shards.db",
    job: Annotated[
        str, typer.Option(help="name of the job; one service serves one job")
    ] = "default",
    lease_ttl: Annotated[
        float,
        typer.Option(
            min=1.0, max=3600.0, help="seconds after which a silent worker's shards go on"
        ),
    ] = 30.0,
    metrics_listen: Annotated[
        str, typer.Option(help="HOST:PORT of the live page and /metrics; empty for none")
    ] = "",
    tls_cert: shared.TlsCert = None,
    tls_key: shared.TlsKey = None,
    tls_client_ca: shared.TlsClientCa = None,
    tokens: shared.TokenFolder = None,
    insecure: shared.Insecure = False,
    antdt_config: Annotated[
        Path | None,
        typer.Option(
            envvar="GMETA_ANTDT_CONFIG",
            help="TOML with \\[monitor] and \\[controller] (stragglers)",
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            envvar="GMETA_ANTDT_DECISIONS", help="file for the controller's decisions, JSON lines"
        ),
    ] = None,
    log_level: shared.LogLevel = "INFO",
    ends_with_stdin: Annotated[
        bool, typer.Option("--ends-with-stdin", help="also end when standard input is closed")
    ] = False,
) -> None:
    """Hand out the shards of a job's data to its workers, each exactly once an epoch.

    gmeta shard-service --insecure --store sqlite:///run/shards.db

    gmeta shard-service --listen 0.0.0.0:7070 --tls-cert tls.crt --tls-key tls.key --tokens tokens/

    Runs until SIGTERM, then answers the calls under way and exits 0. Logs JSON lines to stderr."""
    config = ServiceConfig(
        listen,
        store,
        job,
        lease_ttl,
        metrics_listen,
        ends_with_stdin,
        load_straggler_config(antdt_config),
        decisions,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        tokens=tokens,
    )
    if insecure and config.protection != NOTHING:
        raise ServiceStartError(
            f"--insecure was given beside {config.protection}; a service is the one or the other. "
            "Leave out --insecure, or the rest."
        )
    if not config.secured and not insecure:
        raise ServiceStartError(
            f"of what protects a service there is {config.protection}; --tls-cert, --tls-key and "
            "one of --tls-client-ca and --tokens are needed. Pass them; or --insecure on a "
            "loopback address, where only this machine can call."
        )
    # After the checks: a person reads what is wrong with the options, not a log collector.
    configure_logging(log_level)
    raise typer.Exit(serve_until_signal(config))
