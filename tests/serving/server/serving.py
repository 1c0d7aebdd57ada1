"""A server for tests: in this process without a socket, or as `gmeta serve` in one of its own."""

import asyncio
import json
import re
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pyarrow as pa

from gmeta.serving.server.access import ServerAccess
from gmeta.serving.server.http_app import http_app
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.serve_config import ServeConfig
from gmeta.serving.server.server_metrics import ServerMetrics
from gmeta.serving.server.shared_support import SharedSupport
from gmeta.serving.server.task_cache import TaskCache
from gmeta.serving.server.tracing import Tracing
from gmeta.serving.server.version_loader import load_version
from tests.support.commands import environment
from tests.support.forked import ForkedProcess, Task, forked
from tests.support.waiting import wait_until

T = TypeVar("T")
CACHE_BYTES = 1 << 20
INFER = "/v2/models/model/infer"


@contextmanager
def service_of(
    folder: Path | str, access: ServerAccess | None = None, tracing: Tracing | None = None,
    cache_bytes: int = CACHE_BYTES, shared: SharedSupport | None = None, **settings: Any,
) -> Iterator[InferenceService]:  # fmt: skip
    """A service that answers, in this process."""
    config = replace(ServeConfig(folder, "model", access_log=False), **settings)
    service = InferenceService(
        config, load_version, TaskCache(cache_bytes, 3600.0, shared), ServerMetrics,
        access or ServerAccess(None, False), tracing or Tracing(),
    )  # fmt: skip
    service.warm_up()
    try:
        yield service
    finally:
        service.stop()


def with_client(service: InferenceService, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """What `work` returns, with a client of the service's app."""

    async def run() -> T:
        transport = httpx.ASGITransport(http_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await work(client)

    return asyncio.run(run())


def post(service: InferenceService, body: Any, path: str = INFER, **options: Any) -> httpx.Response:
    """One request's response."""
    if isinstance(body, dict):
        body = json.dumps(body)
    return with_client(service, lambda client: client.post(path, content=body, **options))


def get(service: InferenceService, path: str, **options: Any) -> httpx.Response:
    """One page."""
    return with_client(service, lambda client: client.get(path, **options))


def tensors(rows: pa.Table, prefix: str = "") -> list[dict[str, Any]]:
    """A table's columns as the protocol's inputs; lists as values and lengths."""
    found = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        values = column.to_pylist()
        if pa.types.is_list(column.type):
            lengths = [len(value) for value in values]
            flat = [item for value in values for item in value]
            found.append(tensor(f"{prefix}{name}", "INT64", flat))
            found.append(tensor(f"{prefix}{name}.lengths", "INT64", lengths))
        else:
            is_float = pa.types.is_floating(column.type)
            found.append(tensor(f"{prefix}{name}", "FP64" if is_float else "INT64", values))
    return found


def tensor(name: str, datatype: str, data: Sequence[Any]) -> dict[str, Any]:
    """One input of one dimension."""
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": list(data)}


def request_of(
    query: pa.Table | None = None, support: pa.Table | None = None, key: str = "",
    outputs: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """An inference request."""
    inputs = [] if query is None else tensors(query.drop_columns(["user", "click"]))
    inputs += [] if support is None else tensors(support.drop_columns(["user"]), "support.")
    found: dict[str, Any] = {"inputs": inputs}
    if key:
        found["parameters"] = {"task_key": key}
    if outputs:
        found["outputs"] = [{"name": name} for name in outputs]
    return found


def values(response: httpx.Response, output: str = "prediction") -> np.ndarray[Any, Any]:
    """The values of an output."""
    assert response.status_code == 200, response.text
    (found,) = (each for each in response.json()["outputs"] if each["name"] == output)
    return np.array(found["data"], np.float32)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunningServer:
    """`gmeta serve` in a process of its own."""

    def __init__(self, process: ForkedProcess, port: int, grpc_port: int) -> None:
        self.process = process
        self.port = port
        self.grpc_port = grpc_port

    @property
    def events(self) -> list[Mapping[str, Any]]:
        """What it has logged so far."""
        lines = re.findall(r"^\{.*\}$", self.process.stderr, flags=re.MULTILINE)
        return [json.loads(line) for line in lines]

    def count(self, name: str) -> int:
        """How often it has logged an event of this name."""
        return sum(event["event"] == name for event in self.events)


@contextmanager
def running_server(
    folder: Path, *arguments: str, workers: int = 1, first: Callable[[], None] | None = None
) -> Iterator[RunningServer]:
    """It has logged that it serves, on ports that were free; its process calls `first` before."""
    port, grpc_port = free_port(), free_port()
    command = (
        "serve", str(folder), "--listen", f"127.0.0.1:{port}", "--grpc", f"127.0.0.1:{grpc_port}",
        "--workers", str(workers), *arguments,
    )  # fmt: skip
    if not any(option.startswith(("--tls", "--tokens")) for option in arguments):
        command += ("--insecure",)
    with (
        tempfile.TemporaryDirectory() as place,
        forked(Task("gmeta", command, environment(), Path(place), first=first)) as process,
    ):
        server = RunningServer(process, port, grpc_port)

        def serves() -> bool:
            assert process.poll() is None, process.stderr
            return server.count("serving") >= workers

        wait_until(serves, "the server serves")
        yield server
