"""The options of `gmeta serve`, each with its bounds and its line of help."""

from typing import Annotated, Literal, TypeAlias

import typer

Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="folder that `gmeta export` wrote, a channel, or the URL of one that `gmeta channel "
        "publish` wrote"
    ),
]
Listen: TypeAlias = Annotated[str, typer.Option(help="HOST:PORT for HTTP; port 0 takes a free one")]
Grpc: TypeAlias = Annotated[str, typer.Option(help="HOST:PORT for gRPC; empty for none")]
Name: TypeAlias = Annotated[
    str, typer.Option(help="name that callers use; default: the folder's own")
]
Workers: TypeAlias = Annotated[
    int, typer.Option(min=1, max=256, help="processes that share addresses and tables")
]
Threads: TypeAlias = Annotated[
    int, typer.Option(min=1, max=256, help="threads that each worker computes with")
]
MaxBody: TypeAlias = Annotated[
    int, typer.Option(min=1_000, max=1 << 30, help="bytes that a request may have")
]
MaxRows: TypeAlias = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="rows that a request may have, both sides")
]
Extra: TypeAlias = Annotated[
    Literal["ignore", "refuse"],
    typer.Option(help="inputs that are no columns of the model, as of a feature store's rows"),
]
MaxWaiting: TypeAlias = Annotated[
    int, typer.Option(min=1, max=100_000, help="requests that may wait, each worker; then 429")
]
MaxBatch: TypeAlias = Annotated[
    int, typer.Option(min=1, max=1_024, help="requests that are answered at once")
]
MaxConnections: TypeAlias = Annotated[
    int, typer.Option(min=1, max=100_000, help="connections of each worker")
]
TimeoutS: TypeAlias = Annotated[
    float, typer.Option(min=0.05, max=3_600, help="seconds that a request may take")
]
CacheBytes: TypeAlias = Annotated[
    int, typer.Option(min=0, help="bytes of adapted tasks that each worker keeps; 0: none")
]
CacheTtl: TypeAlias = Annotated[
    float, typer.Option(min=1, help="seconds that an adapted task is kept")
]
ReloadEvery: TypeAlias = Annotated[
    float, typer.Option(min=0, max=3_600, help="seconds between looks for a newer model; 0: never")
]
Drain: TypeAlias = Annotated[
    float, typer.Option(min=0, max=3_600, help="seconds that requests under way may take")
]
DrainDelay: TypeAlias = Annotated[
    float,
    typer.Option(min=0, max=600, help="seconds after SIGTERM in which it still answers, not ready"),
]
Verify: TypeAlias = Annotated[
    bool, typer.Option(help="check the model's checksums before use, which reads all of it")
]
AccessLog: TypeAlias = Annotated[bool, typer.Option(help="log each inference")]
BehindProxy: TypeAlias = Annotated[
    bool, typer.Option("--behind-proxy", help="no TLS and no proof: a proxy in front does both")
]
