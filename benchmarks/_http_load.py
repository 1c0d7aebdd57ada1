"""Callers of an HTTP server that cost little: bodies are made before, connections are kept;
and rows as the inputs of the Open Inference Protocol."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


@dataclass
class Answers:
    """What came back: each request's seconds, how many failed, and the bodies if they were kept."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    spent_s: float = 0.0
    kept: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return (len(self.seconds) - self.failed) / self.spent_s


class Connection:
    """One caller's connection; a request after the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of an answer; status 0 where none came."""
        try:
            return await self._answer(head_of(path, body), body)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return 0, b"{}"

    async def _answer(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        reader, writer = self._streams
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        headers = answer.lower()
        length = int(headers.split(b"content-length:")[1].split(b"\r\n")[0])
        content = await reader.readexactly(length)
        if b"connection: close" in headers:
            self.close()
        return int(answer[9:12]), content

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


def inputs_of(rows: dict[str, list[Any]], prefix: str = "") -> list[dict[str, Any]]:
    """Columns as the protocol's inputs."""
    found: list[dict[str, Any]] = []

    def add(name: str, kind: str, data: list[Any]) -> None:
        found.append({"name": name, "datatype": kind, "shape": [len(data)], "data": data})

    for name, values in rows.items():
        if isinstance(values[0], list):
            add(f"{prefix}{name}", "INT64", [item for value in values for item in value])
            add(f"{prefix}{name}.lengths", "INT64", [len(value) for value in values])
        else:
            kinds = {int: "INT64", float: "FP64", str: "BYTES"}
            add(f"{prefix}{name}", kinds[type(values[0])], values)
    return found


def run(calls: Coroutine[Any, Any, T]) -> T:
    """What comes of them, on an event loop that leaves the core to the server: what callers do with
    an answer, one after the other, is in the latency of those whose answers came with it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(calls)


def head_of(path: str, body: bytes) -> bytes:
    """The head of a POST."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Until so much time is over."""
    until_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until_s


def counted(number: int) -> Callable[[], bool]:
    """So many calls."""
    left = iter(range(number))
    return lambda: next(left, None) is not None


async def closed_loop(
    port: int,
    path: str,
    bodies: Sequence[bytes],
    clients: int,
    go_on: Callable[[], bool],
    keep: bool = False,
) -> Answers:
    """So many callers, each with its next request as soon as its last one is answered."""
    answers, turn = Answers(), iter(range(1 << 60))

    async def caller() -> None:
        connection = Connection(port)
        while go_on():
            index = next(turn) % len(bodies)
            body, began_s = bodies[index], time.perf_counter()
            status, content = await connection.post(path, body)
            answers.seconds.append(time.perf_counter() - began_s)
            answers.failed += status != 200
            if keep and status == 200:
                answers.kept.append((index, json.loads(content)))
        connection.close()

    began_s = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(clients)))
    answers.spent_s = time.perf_counter() - began_s
    return answers


async def paced_loop(
    port: int, path: str, bodies: Sequence[bytes], clients: int, due_s: Sequence[float]
) -> Answers:
    """Requests that are due at these times, dealt out to so many callers in turn. Each is timed
    from when it was due, also where its caller still waited for the answer before it."""
    answers, began_s = Answers(), time.perf_counter()

    async def caller(number: int) -> None:
        connection = Connection(port)
        for index in range(number, len(due_s), clients):
            await asyncio.sleep(max(0.0, began_s + due_s[index] - time.perf_counter()))
            body = bodies[index % len(bodies)]
            status, _ = await connection.post(path, body)
            answers.seconds.append(time.perf_counter() - began_s - due_s[index])
            answers.failed += status != 200
        connection.close()

    await asyncio.gather(*map(caller, range(clients)))
    answers.spent_s = time.perf_counter() - began_s
    return answers


async def open_loop(
    port: int, path: str, bodies: Sequence[bytes], due_s: Sequence[float]
) -> Answers:
    """Requests that are sent at these times, however long answers take; each is timed from when it
    was due."""
    answers, idle, began_s = Answers(), list[Connection](), time.perf_counter()

    async def one(index: int) -> None:
        await asyncio.sleep(max(0.0, began_s + due_s[index] - time.perf_counter()))
        connection = idle.pop() if idle else Connection(port)
        status, _ = await connection.post(path, bodies[index % len(bodies)])
        idle.append(connection)
        answers.seconds.append(time.perf_counter() - began_s - due_s[index])
        answers.failed += status != 200

    await asyncio.gather(*map(one, range(len(due_s))))
    for connection in idle:
        connection.close()
    answers.spent_s = time.perf_counter() - began_s
    return answers
