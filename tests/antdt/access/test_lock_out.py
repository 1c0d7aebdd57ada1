"""Callers without a proof, and idle ones, keep nobody else out: honest callers are answered."""

import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gmeta.access import auth, http_edge
from gmeta.antdt.client.connection import ConnectionConfig, ServiceConnection
from gmeta.antdt.service.shard_server import SERVICE_NAME, ServiceConfig, ShardServer
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc
from tests.antdt.faults.service_process import free_port
from tests.antdt.pki import Authority
from tests.support.waiting import PATIENCE_S, wait_until

TOKEN = "viewer-0123456789abcdef"
WORKER = "worker-0123456789abcdef"
STATUS = f"/{SERVICE_NAME}/Status"
CHECK = "/grpc.health.v1.Health/Check"


def proof(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for role, token in (("viewer", TOKEN), ("worker", WORKER)):
        (folder / role).write_text(token)
    return folder


@pytest.fixture
def guarded(pki: Authority, tokens: Path) -> Iterator[ShardServer]:
    cert, key = pki.issue("service")
    files: dict[str, Any] = {"tls_cert": cert, "tls_key": key, "tokens": tokens}
    server = ShardServer(ServiceConfig("127.0.0.1:0", metrics_listen="127.0.0.1:0", **files))
    yield server
    server.stop(0.0)


@pytest.fixture
def channel(guarded: ShardServer, pki: Authority) -> Iterator[Any]:
    """One that is shared with nobody: gRPC takes at most 256 calls at once on a connection."""
    credentials = grpc.ssl_channel_credentials(pki.ca.read_bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(guarded.address, credentials, options) as made:
        yield made


class HalfOpen:
    """Calls whose message never comes."""

    def __init__(self, channel: Any, path: str, count: int, metadata: Any = ()) -> None:
        self._never = threading.Event()
        method = channel.stream_unary(path)
        self.calls = [method.future(self._silence(), metadata=metadata) for _ in range(count)]

    def _silence(self) -> Iterator[bytes]:
        self._never.wait()
        yield from ()

    def codes(self) -> list[str]:
        return [each.code().name for each in self.calls]  # waits for the end of each

    def close(self) -> None:
        self._never.set()
        for each in self.calls:
            each.cancel()


def end_of(stream: Any, most: int = 5) -> str:
    """The code that a stream ends with, after so many responses at most."""
    try:
        return f"still sends: {[next(stream) for _ in range(most)]}"
    except grpc.RpcError as error:
        return str(error.code().name)  # type: ignore[attr-defined]


@pytest.fixture
def works(guarded: ShardServer, pki: Authority, tokens: Path) -> Callable[[], bool]:
    """Whether a worker's call is answered, at its first try."""
    proofs = {"tls_ca": pki.ca, "token_file": tokens / "worker"}

    def answers() -> bool:
        config = ConnectionConfig(guarded.address, 0.0, PATIENCE_S, **proofs)
        with closing(ServiceConnection(config)) as connection:
            return bool(connection.call("Status", pb.StatusRequest).job == "default")

    return answers


def test_a_stranger_is_refused_before_the_message_is_waited_for(channel: Any, works: Any) -> None:
    with closing(HalfOpen(channel, STATUS, 100)) as strangers:
        assert strangers.codes() == ["UNAUTHENTICATED"] * 100
        assert works()


def test_a_call_with_a_proof_whose_message_never_comes_does_not_keep_its_place(
    guarded: ShardServer, channel: Any, works: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MESSAGE_TIMEOUT_S", 0.05)
    with closing(HalfOpen(channel, STATUS, 20, proof(WORKER))) as silent:
        assert silent.codes() == ["RESOURCE_EXHAUSTED"] * 20
    assert guarded._guard is not None
    wait_until(lambda: guarded._guard._num_calls == 0, "no call under way")
    monkeypatch.undo()
    assert works()


def test_an_honest_probe_is_answered_beside_those_that_never_end(
    guarded: ShardServer, channel: Any, works: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded._guard, "most_probes", 4)
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    with closing(HalfOpen(channel, CHECK, 20)) as silent:
        # Calls that set out together may overtake one another, so each is waited for.
        wait_until(lambda: sum(call.done() for call in silent.calls) == 16, "all but 4 ended")
        watches = []
        for _ in range(20):
            watches.append(health.Watch(request, timeout=PATIENCE_S))
            assert next(watches[-1]).status == 1
        for each in range(5):
            assert health.Check(request, timeout=PATIENCE_S).status == 1, each
        # All but the newest were ended, and told that they were.
        assert silent.codes() == ["RESOURCE_EXHAUSTED"] * 20
        assert [end_of(watch) for watch in watches[:16]] == ["RESOURCE_EXHAUSTED"] * 16
        assert works()
        for watch in watches:
            watch.cancel()


def test_calls_with_a_proof_have_a_limit_of_their_own(
    guarded: ShardServer, channel: Any, works: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "MAX_CALLS", 2)
    stub = pb_grpc.ShardServiceStub(channel)
    watches = [stub.Watch(pb.WatchRequest(), metadata=proof(TOKEN)) for _ in range(2)]
    for watch in watches:
        next(watch)
    with pytest.raises(grpc.RpcError) as full:
        stub.Status(pb.StatusRequest(), metadata=proof(WORKER))
    assert full.value.code().name == "RESOURCE_EXHAUSTED"
    found = full.value.details()
    assert found == "2 calls are under way; no more are taken. Retry after a pause."
    request = health_pb2.HealthCheckRequest()
    assert health_pb2_grpc.HealthStub(channel).Check(request).status == 1
    for watch in watches:
        watch.cancel()
    wait_until(lambda: guarded._guard._num_calls == 0, "no call under way")
    assert works()


def test_a_watch_and_a_page_end_when_their_token_is_withdrawn(
    guarded: ShardServer, channel: Any, pki: Authority, tokens: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(auth, "_RELOAD_EVERY_S", 0.0)
    monkeypatch.setattr("gmeta.antdt.dashboard.EVERY_S", 0.01)
    watch = pb_grpc.ShardServiceStub(channel).Watch(
        pb.WatchRequest(interval_ms=200), metadata=proof(TOKEN)
    )
    next(watch)
    context = ssl.create_default_context(cafile=pki.ca)
    page = http.client.HTTPSConnection(
        "127.0.0.1", guarded.metrics_port, timeout=PATIENCE_S, context=context
    )
    page.request("GET", "/events", headers=dict(proof(TOKEN)))
    events = page.getresponse()
    assert json.loads(events.readline().removeprefix(b"data: "))["job"] == "default"
    (tokens / "viewer").write_text("another-0123456789abcdef")
    # What was under way may still come; then it is the end.
    assert end_of(watch) == "UNAUTHENTICATED"
    assert any(not events.readline() for _ in range(10_000))
    page.close()


class Slow:
    """Connections that have sent a part of a request, and no more."""

    def __init__(self, port: int, count: int, begin: bytes) -> None:
        self._stack = ExitStack()
        self.sockets = []
        for _ in range(count):
            made = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            self.sockets.append(self._stack.enter_context(made))
            made.sendall(begin)

    def close(self) -> None:
        self._stack.close()


def probe(port: int, pki: Authority) -> str:
    """What /healthz says to a probe, as Kubernetes asks: nothing of the certificate is checked."""
    context = ssl._create_unverified_context()
    with closing(
        http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE_S, context=context)
    ) as connection:
        connection.request("GET", "/healthz")
        return connection.getresponse().read().decode()


@pytest.mark.parametrize("begin", [b"", b"\x16\x03\x01\x3f\xff"], ids=["silent", "half a hello"])
def test_a_probe_is_answered_beside_connections_that_never_ask(
    guarded: ShardServer, pki: Authority, begin: bytes
) -> None:
    with closing(Slow(guarded.metrics_port, 2 * http_edge.MAX_WAITING, begin)) as slow:
        for _ in range(3):
            assert probe(guarded.metrics_port, pki) == "serving\n"
        # The oldest made room.
        assert all(hung_up(each) for each in slow.sockets[: http_edge.MAX_WAITING])


def hung_up(caller: socket.socket) -> bool:
    try:
        return not caller.recv(1)
    except ConnectionError:
        return True


SERVE = """
import resource, sys
hard = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 200), hard))
from gmeta.antdt.service import shard_server
shard_server.HANDSHAKE_TIMEOUT_S = 1
from gmeta.cli.commands.shard_service import shard_service
import typer
typer.run(shard_service)
"""


def serving(hard: int, port: int, metrics_port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SERVE, str(hard), "--insecure", "--store", "memory:"]
    command += ["--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics_port}"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_idle_connections_take_neither_the_probes_descriptors_nor_for_ever_the_workers() -> None:
    port, metrics_port = free_port(), free_port()
    config = ConnectionConfig(f"127.0.0.1:{port}", PATIENCE_S, PATIENCE_S)
    with serving(200, port, metrics_port) as process, ExitStack() as stack:
        first = stack.enter_context(closing(ServiceConnection(config)))
        first.call("Status", pb.StatusRequest)
        for _ in range(400):
            idle = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            stack.enter_context(idle)
        page = http.client.HTTPConnection("127.0.0.1", metrics_port, timeout=PATIENCE_S)
        page.request("GET", "/healthz")
        assert page.getresponse().read() == b"serving\n"
        # One that is connected, and one that comes now: it has a place once the idle ones lose it.
        first.call("Status", pb.StatusRequest)
        late = stack.enter_context(closing(ServiceConnection(config)))
        assert late.call("Status", pb.StatusRequest).job == "default"
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
    warned = json.loads(log.splitlines()[0])
    expected = ("few_descriptors", 200, 100)
    assert (warned["event"], warned["limit"], warned["max_connections"]) == expected


def test_the_limit_of_descriptors_is_raised_as_far_as_the_process_may() -> None:
    port = free_port()
    with serving(4500, port, free_port()) as process:
        config = ConnectionConfig(f"127.0.0.1:{port}", PATIENCE_S, PATIENCE_S)
        with closing(ServiceConnection(config)) as connection:
            connection.call("Status", pb.StatusRequest)
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
    (line,) = [each for each in limits.splitlines() if each.startswith("Max open files")]
    assert line.split()[3:5] == ["4500", "4500"]
    assert "few_descriptors" not in log
