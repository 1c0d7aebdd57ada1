"""Calls of `gmeta shards` to the service, one at a time, and their options."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gmeta.antdt.client.connection import ConnectionConfig, ServiceConnection
from gmeta.antdt.errors import ServiceUnavailableError

# A person waits for the answer: it is reported soon that the service is away.
OPERATOR_BUDGET_S = 5.0

Address = Annotated[
    str, typer.Option("--service", envvar="GMETA_SHARD_SERVICE", help="HOST:PORT of the service")
]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="GMETA_SHARD_TOKEN_FILE", help="file with the service's token")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="GMETA_SHARD_TLS_CA", help="certificate authority of a service with TLS"),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="GMETA_SHARD_TLS_CERT", help="own certificate, where the service asks"),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="GMETA_SHARD_TLS_KEY", help="key of the own certificate")
]
Call = Callable[[str, Any], Any]  # (name of the RPC, request) -> response


def make_caller(
    address: str,
    token_file: Path | None,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> Call:
    """Return a function that makes one call of the service, on a connection of its own."""
    config = ConnectionConfig(
        address,
        OPERATOR_BUDGET_S,
        OPERATOR_BUDGET_S,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        token_file=token_file,
    )

    # A connection for each call: a command makes one or two.
    def call(rpc: str, request: Any) -> Any:
        connection = ServiceConnection(config)
        try:
            return connection.call(rpc, lambda: request)
        except ServiceUnavailableError as error:
            if getattr(error.__cause__, "reason", ""):
                # The service answered, and said why it cannot.
                raise
            raise ServiceUnavailableError(
                f"no shard service answered at {address}: {error.__cause__}. Start it, or name "
                "another by --service HOST:PORT or GMETA_SHARD_SERVICE; a job's own stands in "
                "RUN/shards/address."
            ) from error
        finally:
            connection.close()

    return call
