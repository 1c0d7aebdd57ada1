"""Options that `gmeta serve` and `gmeta shard-service` share: who may call, and what is logged."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

TlsCert: TypeAlias = Annotated[Path | None, typer.Option(help="PEM certificate of the service")]
TlsKey: TypeAlias = Annotated[Path | None, typer.Option(help="PEM key of the certificate")]
TlsClientCa: TypeAlias = Annotated[
    Path | None, typer.Option(help="demand client certificates of this authority")
]
TokenFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="folder with the files worker, operator, viewer: tokens, one a line"),
]
Insecure: TypeAlias = Annotated[
    bool, typer.Option("--insecure", help="no TLS and no proof; for callers of this machine")
]
LogLevel: TypeAlias = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"], typer.Option(case_sensitive=False)
]
