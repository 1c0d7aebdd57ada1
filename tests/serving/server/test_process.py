"""`gmeta serve` as a process: published clients, several workers, TLS, newer versions, the end."""

import asyncio
import errno
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import UserError
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.version_cache import CACHE_VARIABLE
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server import server_processes as process
from gmeta.serving.server.http_connection import UvicornServer, http_server
from gmeta.serving.server.serve_config import ServeConfig
from gmeta.serving.server.server_limits import BatchLimits
from gmeta.serving.server.server_processes import _folder_in_memory, _WorkerGroup, _WorkerProcess
from gmeta.serving.server.server_worker import _report_life, _serve_until_stopped, bind_socket
from gmeta.serving.server.versions import version_in
from gmeta_keys.stop_flag import stop_signals
from gmeta_protos.inference.v2 import open_inference_pb2 as pb
from gmeta_protos.inference.v2 import open_inference_pb2_grpc as pb_grpc
from metaio.format.atomic_folder import replace_folder
from tests.antdt.pki import Authority
from tests.serving.channel.models import Model
from tests.serving.server.serving import (
    INFER,
    RunningServer,
    free_port,
    request_of,
    running_server,
    service_of,
    tensors,
    values,
    with_client,
)
from tests.serving.server.test_grpc import message
from tests.serving.server.test_http import make_tokens
from tests.support.commands import gmeta as run_gmeta
from tests.support.exported import random_rows, write_random_model
from tests.support.interrupted import exit_code_of, interrupted
from tests.support.waiting import PATIENCE_S, wait_until

QUERY = random_rows(6, seed=2)
SUPPORT = random_rows(9, seed=1)


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[RunningServer]:
    with running_server(exported, workers=2) as found:
        yield found


def url(server: RunningServer, path: str = INFER, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{server.port}{path}"


def ask(server: RunningServer, **request: Any) -> httpx.Response:
    """On a connection of its own: the kernel chooses the worker."""
    return httpx.post(url(server), json=request_of(**request), timeout=PATIENCE_S)


@pytest.mark.parametrize("protocol", ["http", "http-json", "grpc"])
def test_a_published_client_is_answered(
    server: RunningServer, model: ServedModel, tmp_path: Path, protocol: str
) -> None:
    pytest.importorskip("tritonclient", reason="the client is a development dependency")
    request = request_of(QUERY, SUPPORT) | {"outputs": [], "parameters": None, "column": True}
    if protocol == "grpc":
        request |= {"outputs": ["prediction", "prediction_before"]}
        request |= {"parameters": {"task_key": "triton"}}
    (tmp_path / "request").write_text(json.dumps(request))
    port = server.grpc_port if protocol == "grpc" else server.port
    script = Path(__file__).with_name("triton_client.py")
    result = subprocess.run(
        [sys.executable, script, f"127.0.0.1:{port}", protocol, tmp_path / "request"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    expected = model.adapt(SUPPORT).predict(QUERY).numpy()
    np.testing.assert_allclose(answer["prediction"], expected, rtol=0, atol=1e-6)
    if answer["before"] is not None:
        before = model.predict(QUERY).numpy()
        np.testing.assert_allclose(answer["before"], before, rtol=0, atol=1e-6)
    assert (answer["live"], answer["ready"], answer["server"]) == (True, True, True)
    assert answer["inputs"][:2] == ["item", "city"]
    assert "query rows have no column city; they have item." in answer["error"]


BOTH_CLIENTS = """
import grpc, sys
from importlib import import_module
for module in sys.argv[2:]:
    import_module(module)
import tritonclient.grpc as triton
from gmeta_protos.inference.v2 import open_inference_pb2 as pb
from gmeta_protos.inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub
stub = GRPCInferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
ours = stub.ModelMetadata(pb.ModelMetadataRequest(name="model"))
theirs = triton.InferenceServerClient(sys.argv[1]).get_model_metadata("model")
assert ours.SerializeToString() == theirs.SerializeToString()
print(ours.name)
"""


@pytest.mark.parametrize("ours_first", [True, False])
def test_our_stubs_and_a_published_client_share_a_process(
    server: RunningServer, ours_first: bool
) -> None:
    pytest.importorskip("tritonclient", reason="the client is a development dependency")
    modules = ["gmeta_protos.inference.v2.open_inference_pb2_grpc", "tritonclient.grpc"]
    command = [sys.executable, "-c", BOTH_CLIENTS, f"127.0.0.1:{server.grpc_port}"]
    result = subprocess.run(
        [*command, *(modules if ours_first else modules[::-1])], capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "model\n"), result.stderr


def test_calls_of_triton_alone_are_refused_in_a_line(server: RunningServer) -> None:
    """What perf_analyzer asks for, what streams, and what is of no service of ours."""
    inference = "inference.GRPCInferenceService"
    known = "ServerLive, ServerReady, ModelReady, ServerMetadata, ModelMetadata, ModelInfer"
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for name in ("ModelConfig", "ModelStatistics", "RepositoryIndex", "ModelStreamInfer"):
            for path in (f"/{inference}/{name}", f"/other.Service/{name}"):
                # No message is sent: a call of either kind is refused by its name alone.
                responses = channel.stream_stream(path)(iter(()), timeout=PATIENCE_S)
                with pytest.raises(grpc.RpcError) as caught:
                    next(responses)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert caught.value.details() == (
                    f"call {path!r} is not answered; {inference} has {known}. Call one of these"
                )
        with pytest.raises(grpc.RpcError, match="is not answered"):
            channel.unary_unary(f"/{inference}/ModelConfig")(b"", timeout=PATIENCE_S)


def test_every_worker_knows_a_task_of_one(server: RunningServer, model: ServedModel) -> None:
    def results() -> set[str]:
        answer = ask(server, query=QUERY, key="shared")
        np.testing.assert_allclose(values(answer), expected, rtol=0, atol=1e-6)
        return {answer.json()["parameters"]["task_cache"]}

    expected = model.adapt(SUPPORT).predict(QUERY).numpy()
    ask(server, query=QUERY, support=SUPPORT, key="shared")
    seen: set[str] = set()
    # Restored by the worker that was not given it, once that one is asked.
    wait_until(lambda: seen.update(results()) or "restored" in seen, "the other worker is asked")
    expected = model.adapt(QUERY).predict(QUERY).numpy()
    ask(server, query=QUERY, support=QUERY, key="shared")
    for _ in range(8):
        results()  # newer rows count in every worker at once


def test_metrics_are_those_of_all_workers(server: RunningServer) -> None:
    def answered() -> float:
        page = httpx.get(url(server, "/metrics")).text
        start = 'gmeta_serve_requests_total{protocol="http",status="200"} '
        return sum(float(line.removeprefix(start)) for line in page.splitlines() if start in line)

    before = answered()
    for _ in range(10):
        ask(server, query=QUERY)
    assert answered() == before + 10


def test_who_asks_for_another_protocol_is_answered_in_this_one(server: RunningServer) -> None:
    """Java's own client does with each request, of which httptools would drop the body."""
    body = json.dumps(request_of(QUERY)).encode()
    # Its second line begins as the header does, and is none.
    parts = [body[:-1] + b', "id": "', b'Upgrade: stays"}', b""]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n".encode()
    whole = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    told = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        for sent in (whole, whole, chunked):
            if sent is chunked:
                more = b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
                connection.sendall(head + more)
                # The head is read by then.
                assert connection.recv(25, socket.MSG_WAITALL).startswith(b"HTTP/1.1 100")
            connection.sendall(sent)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            told.append(json.loads(answer.read()))
    assert [len(one["outputs"][0]["data"]) for one in told] == [QUERY.num_rows] * 3
    assert told[2]["id"] == "Upgrade: stays"


@pytest.mark.parametrize("pieces", ["pipelined", "split", "bytes"])
def test_a_body_is_kept_wherever_its_request_to_upgrade_is_cut(
    server: RunningServer, pieces: str
) -> None:
    """Also where a body looks like the header, and behind thousands of such requests."""
    plain, http2 = "X: y", "Connection: Upgrade\r\nUpgrade: h2c"
    last, sent = "Connection: upgrade, close\r\nUPGRADE:\twebsocket", b""
    for place, more in enumerate((plain, http2, last)):
        body = json.dumps(request_of(QUERY) | {"id": f"{place}\nupgrade: 1"}, indent=1).encode()
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{more}\r\nContent-Length: {len(body)}"
        sent += head.encode() + b"\r\n\r\n" + body
    many = 2_000 if pieces == "pipelined" else 0
    sent = f"GET /v2 HTTP/1.1\r\nHost: x\r\n{http2}\r\n\r\n".encode() * many + sent
    size = {"pipelined": len(sent), "split": len(sent) // 7, "bytes": 1}[pieces]
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1 200 ") == many + 3, received[-1000:]
    ids = re.findall(rb'"id": ?"(.)\\nupgrade: 1"', received)
    assert ids == [b"0", b"1", b"2"]


def test_a_worker_that_dies_is_started_again(exported: Path) -> None:
    with running_server(exported, workers=2) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        victim = children.read_text().split()[0]
        os.kill(int(victim), signal.SIGKILL)
        wait_until(lambda: server.count("serving") == 3, "another worker serves")
        assert server.count("worker_died") == 1
        for _ in range(6):
            assert ask(server, query=QUERY).status_code == 200


def lose_patience_soon() -> None:
    process._MOST_SILENT_LOOKS = 25


def test_a_worker_that_hangs_is_replaced(exported: Path) -> None:
    with running_server(exported, workers=2, first=lose_patience_soon) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        victim = int(children.read_text().split()[0])
        os.kill(victim, signal.SIGSTOP)
        wait_until(lambda: server.count("serving") >= 3, "another worker serves")
        hung = [each["pid"] for each in server.events if each["event"] == "worker_hangs"]
        assert hung == [victim]
        for _ in range(6):
            assert ask(server, query=QUERY).status_code == 200


def test_a_worker_whose_batch_never_ends_says_nothing_more(exported: Path) -> None:
    limits = BatchLimits(inline_s=-1.0)
    with service_of(exported, batch=limits) as service:
        held, run = threading.Event(), service._batcher._run
        service._batcher._run = lambda requests: (held.wait(PATIENCE_S), run(requests))[1]
        service._batcher._rows_per_s = 1e-6  # long: in a thread

        async def work(client: httpx.AsyncClient) -> list[bool]:
            call = asyncio.create_task(client.post(INFER, content=json.dumps(request_of(QUERY))))
            while not service._batcher.busy_s:
                await asyncio.sleep(0.005)
            stuck = [service.is_stuck]
            service._batcher._began_s -= 100
            stuck.append(service.is_stuck)
            held.set()
            assert (await call).status_code == 200
            return [*stuck, service.is_stuck]

        assert with_client(service, work) == [False, True, False]


def test_a_worker_that_computes_in_its_loop_is_alive(exported: Path) -> None:
    with service_of(exported) as service:
        alive = threading.Event()

        async def work(client: httpx.AsyncClient) -> list[bool]:
            task = asyncio.create_task(_report_life(service, alive.set))
            await asyncio.sleep(0)
            alive.clear()
            signs = [alive.wait(PATIENCE_S)]  # in the loop, which turns no more
            service.turned_s -= 100
            signs.append(service.is_stuck)
            task.cancel()
            return signs

        assert with_client(service, work) == [True, True]


def test_a_worker_that_cannot_restart_leaves_others_serving(exported: Path, tmp_path: Path) -> None:
    """It may have died with its disk: that comes back, and the server must not be gone by then."""
    folder = shutil.copytree(exported, tmp_path / "model")
    with running_server(folder, workers=2) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        folder.rename(tmp_path / "away")
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        wait_until(lambda: server.count("worker_died") >= 2, "another worker has failed to start")
        assert server.process.poll() is None
        assert ask(server, query=QUERY).status_code == 200
        (tmp_path / "away").rename(folder)
        wait_until(lambda: server.count("serving") == 3, "another worker serves")
        # Where all keep their metrics, in memory, those that never served left nothing.
        names = [path.stem for path in metrics_of(server).iterdir()]
        assert len({name.rpartition("_")[2] for name in names}) == 3


def test_a_worker_that_cannot_start_is_tried_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now_s, died = [0.0], []
    monkeypatch.setattr(process.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(process, "mark_process_dead", lambda pid: None)
    monkeypatch.setattr(process, "event", lambda *_, **told: died.append(told["again_in_s"]))
    dead = SimpleNamespace(is_alive=lambda: False, exitcode=1, pid=1)
    silent = SimpleNamespace(poll=lambda: False)

    def started(self: _WorkerGroup, pause_s: float = 0.0) -> _WorkerProcess:
        return _WorkerProcess(dead, silent, pause_s)  # type: ignore[arg-type]

    monkeypatch.setattr(_WorkerGroup, "_start", started)
    keeper = _WorkerGroup(ServeConfig(tmp_path, "model"), print, print)
    workers = [_WorkerProcess(dead, silent, serves=True) for _ in range(2)]  # type: ignore[arg-type]
    for _ in range(1000):
        assert keeper._restart_dead(workers) == 0
        now_s[0] += 0.2
    # The pauses of one take nothing from the other.
    assert died == [pause_s for pause_s in (1, 2, 4, 8, 16, 32, 60, 60, 60) for _ in workers]


def metrics_of(server: RunningServer) -> Path:
    """The folder that all workers keep their metrics in: they have mapped its files."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    maps = "".join(Path(f"/proc/{child}/maps").read_text() for child in children)
    return Path(re.findall(r"\S+/metrics/\w+_\d+\.db", maps)[0]).parent


def test_a_worker_that_reads_its_model_takes_no_connection() -> None:
    """The kernel would give it its share of them, which waited for the model, or were reset."""
    port = free_port()
    with (
        bind_socket("--listen", f"127.0.0.1:{port}", shared=True),
        socket.socket() as caller,
        pytest.raises(ConnectionRefusedError),
    ):
        caller.connect(("127.0.0.1", port))


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_worker_says_that_it_serves_once_it_listens(exported: Path, ending: int) -> None:
    port, told = free_port(), []

    def tell(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)):
            told.append(port)
        signal.raise_signal(ending)

    before = signal.signal(ending, signal.SIG_DFL)  # under nohup SIGHUP ends nothing
    try:
        asyncio.run(_serve_until_stopped(shared_config(exported, port), tell))
    finally:
        signal.signal(ending, before)
    assert told == [port]


def test_a_worker_that_may_not_listen_does_not_end_as_if_it_had_served(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def startup(self: UvicornServer, sockets: Any) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(UvicornServer, "startup", startup)
    port, told = free_port(), []
    with pytest.raises(UserError) as caught:
        asyncio.run(_serve_until_stopped(shared_config(exported, port), told.append))
    assert str(caught.value) == (
        f"cannot serve at --listen 127.0.0.1:{port}: address already in use. Stop what has it, or "
        "name another address of this machine"
    )
    assert told == []


def test_a_proxy_closes_an_idle_connection_before_the_server_does() -> None:
    """Else it sends a request on one that is just closed: nginx waits for 60 s, others as long."""
    config = http_server(None, max_connections=1, drain_s=1.0, tls=None).config
    assert config.timeout_keep_alive > 60


def shared_config(folder: Path, port: int) -> ServeConfig:
    """As one of two workers has it."""
    address = f"127.0.0.1:{port}"
    return ServeConfig(folder, "model", address, workers=2, insecure=True, reload_every_s=0.0)


def test_a_strangers_memory_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may be a pipe, whose opening would wait for a writer for ever."""
    monkeypatch.setattr(process, "_IN_MEMORY", tmp_path)
    own, strangers, link = (tmp_path / f"gmeta-serving-{name}" for name in ("own", "its", "link"))
    for left in (own, strangers):
        left.mkdir()
    (own / "lock").touch()
    os.mkfifo(strangers / "lock")
    link.symlink_to(strangers)
    lstat = Path.lstat

    def of_whom(path: Path) -> os.stat_result:
        found = lstat(path)
        if path != strangers:
            return found
        values = list(found)
        values[stat.ST_UID] += 1
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", of_whom)
    # A writer, so that whoever opens it all the same is seen and does not wait.
    writer = os.open(strangers / "lock", os.O_RDWR)
    try:
        with _folder_in_memory() as folder:
            assert set(tmp_path.iterdir()) == {Path(folder), strangers, link}
            assert (strangers / "lock").exists()
    finally:
        os.close(writer)


def test_a_server_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == [signal.SIGTERM, signal.SIGINT]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_in_the_middle_of_a_wait_ends_the_workers_too(tmp_path: Path) -> None:
    assert exit_code_of(run_interrupted, tmp_path) == 0


def run_interrupted(folder: Path) -> int:
    workers = _WorkerGroup(ServeConfig(folder, "model", workers=0), print, print)
    return interrupted(workers.run, _WorkerGroup.run.__code__)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_address_of_the_page_is_printed_once_it_answers(exported: Path, workers: int) -> None:
    with running_server(exported, workers=workers) as server:
        wait_until(lambda: server.process.stdout, "the line with the address")
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        if workers > 1:  # one that comes later says nothing
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
            wait_until(lambda: server.count("serving") == 3, "another worker serves")
        page = f"http://127.0.0.1:{server.port}/"
        assert server.process.stdout == f"Open {page} in a browser: model answers.\n"
        browser = {"Accept": "text/html"}
        answer = httpx.get(page, headers=browser, follow_redirects=True, timeout=PATIENCE_S)
        assert (answer.status_code, str(answer.url)) == (200, f"{page}docs")


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:0", "http://127.0.0.1:81"), ("0.0.0.0:80", "http://localhost:81"),
        ("[::]:80", "http://localhost:81"), ("[::1]:80", "http://[::1]:81"),
        ("::1:80", "http://[::1]:81"), ("model.local:80", "http://model.local:81"),
    ],
)  # fmt: skip
def test_a_url_leads_a_browser_of_this_machine(listen: str, url: str) -> None:
    assert ServeConfig("model", "model", listen).url(81) == url
    secured = ServeConfig("model", "model", listen, tls_cert=Path("tls.crt"))
    assert secured.url(81) == url.replace("http", "https")


def test_workers_end_with_the_process_that_started_them(exported: Path, tmp_path: Path) -> None:
    # Servers of other tests would take away what this one leaves.
    first = partial(keep_in, tmp_path)
    with running_server(exported, workers=2, first=first) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        workers, metrics = children.read_text().split(), metrics_of(server)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(worker) for worker in workers), "the workers' end")
    # What it kept in memory, rows of tasks among it, goes with the next server's start.
    assert metrics.exists()
    with running_server(exported, workers=2, first=first):
        assert not metrics.exists()


def keep_in(place: Path) -> None:
    process._IN_MEMORY = place


def is_running(pid: str) -> bool:
    """Whether there is such a process, and it is none that has ended and waits to be looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_requests_under_way_are_answered_at_the_end(exported: Path) -> None:
    with running_server(exported, "--drain-delay", "0.5") as server:

        async def until_the_end() -> list[int]:
            body = json.dumps(request_of(QUERY, SUPPORT))
            codes: list[int] = []
            ended = asyncio.Event()

            async def caller() -> None:
                async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                    while not ended.is_set():
                        codes.append((await client.post(url(server), content=body)).status_code)

            async def ready() -> httpx.Response:
                async with httpx.AsyncClient() as client:
                    return await client.get(url(server, "/v2/health/ready"))

            callers = [asyncio.create_task(caller()) for _ in range(4)]
            while len(codes) < 20:
                await asyncio.sleep(0.01)
            os.kill(server.process.pid, signal.SIGTERM)
            # Not ready, and answering all the same: a balancer looks, and its callers stop.
            while (answer := await ready()).status_code == 200:
                assert "connection" not in answer.headers
                await asyncio.sleep(0.01)
            # No caller keeps a connection that would end under its next request.
            assert answer.headers["connection"] == "close"
            ended.set()
            await asyncio.gather(*callers)
            return codes

        codes = asyncio.run(until_the_end())
        assert set(codes) == {200}
        wait_until(lambda: server.process.poll() is not None, "the server ends")
        assert server.process.poll() == 0
        assert server.count("stopped") == 1


def as_on_two_cores() -> None:
    """What torch does by itself on a machine of two cores, where OMP_NUM_THREADS is not set."""
    torch.set_num_threads(2)


def test_workers_of_a_channel_compute_with_threads_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the process that forks them are not there in a worker, which would wait for them.
    It makes the chain whole, with tables so large that torch shares the work out."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "writer"))
    channel, delta = Channel(tmp_path / "channel"), Model.of({"item": 60_000, "city": 30})
    for number in (1, 2):
        packed = tmp_path / f"{number}.packed"
        pack(channel, delta.write(tmp_path / str(number)), packed, overwrite=False)
        channel.promote(packed)
        delta = delta.changed(np.random.default_rng(0))
    assert channel.version(2).delta is not None
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "reader"))
    rows = pa.table({"item": range(9_000), "city": [1] * 9_000, "price": [0.5] * 9_000})
    options = ("--threads", "2")
    with running_server(channel.root, *options, workers=2, first=as_on_two_cores) as server:
        body = json.dumps({"inputs": tensors(rows)})
        address = url(server, "/v2/models/channel/infer")
        found = values(httpx.post(address, content=body, timeout=PATIENCE_S))
    expected = gmeta.load(tmp_path / "2").predict(rows).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_newer_versions_are_served_under_load_without_a_failed_request(tmp_path: Path) -> None:
    """Each answer is one version's, whichever it names, and never a mixture of two."""
    folder = tmp_path / "model"
    expected: dict[str, np.ndarray[Any, Any]] = {}
    queries = {
        "adapted": {"query": QUERY, "support": SUPPORT},
        "kept": {"query": QUERY, "key": "kept"},
    }

    def export(steps: int) -> str:
        partial = tmp_path / "partial"
        rates = AlgorithmConfig(inner_steps=steps, inner_lr=0.3)
        write_random_model(partial, algorithm=rates)
        loaded = gmeta.load(partial, verify=False)
        prediction = loaded.adapt(SUPPORT).predict(QUERY).numpy()
        version = version_in(partial)
        expected[version] = prediction
        replace_folder(partial, folder)
        return version

    export(1)
    options = ("--reload-every", "0.05", "--timeout", str(PATIENCE_S))
    with running_server(folder, *options, workers=2) as server:
        answers: list[tuple[str, httpx.Response]] = []

        async def load_and_swap() -> None:
            ended = asyncio.Event()

            async def caller(kind: str) -> None:
                body = json.dumps(request_of(**queries[kind]))
                async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                    while not ended.is_set():
                        answers.append((kind, await client.post(url(server), content=body)))

            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                first = json.dumps(request_of(QUERY, SUPPORT, key="kept"))
                await client.post(url(server), content=first)
            callers = [asyncio.create_task(caller(kind)) for kind in ("adapted", "kept") * 2]
            for steps in (2, 3, 4):
                version = await asyncio.to_thread(export, steps)

                def all_serve(version: str = version) -> bool:
                    reloaded = [e for e in server.events if e["event"] == "model_reloaded"]
                    return sum(event["version"] == version for event in reloaded) == 2

                def both_seen(version: str = version) -> bool:
                    named = f'"{version}"'
                    return {kind for kind, each in answers if named in each.text} == set(queries)

                await asyncio.to_thread(wait_until, all_serve, "both workers serve it", 0.05)
                await asyncio.to_thread(wait_until, both_seen, "callers have met it", 0.05)
            ended.set()
            await asyncio.gather(*callers)

        asyncio.run(load_and_swap())
    assert len(expected) == 4
    seen = set()
    for kind, answer in answers:
        found = values(answer)
        version = answer.json()["model_version"]
        seen.add((kind, version))
        np.testing.assert_allclose(found, expected[version], rtol=0, atol=1e-6)
    newer = list(expected)[1:]  # the first may be gone before anybody asks
    assert seen >= {(kind, version) for kind in queries for version in newer}


def test_tls_with_tokens_and_certificates(exported: Path, tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "tokens")
    authority = Authority(tmp_path / "pki")
    cert, key = authority.issue("server")
    options = (
        "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.ca),
        "--tokens", str(tmp_path / "tokens"),
    )  # fmt: skip
    worker = authority.issue("worker", "worker")
    with running_server(exported, *options) as server:
        trust = ssl.create_default_context(cafile=str(authority.ca))
        with_certificate = ssl.create_default_context(cafile=str(authority.ca))
        with_certificate.load_cert_chain(*worker)
        headers = {"Authorization": f"Bearer {tokens['worker']}"}
        codes = []
        for context, shown in ((trust, {}), (trust, headers), (with_certificate, headers)):
            with httpx.Client(verify=context, headers=shown) as client:
                secure = url(server, scheme="https")
                codes.append(client.post(secure, json=request_of(QUERY)).status_code)
        assert codes == [401, 401, 200]
        looks = {"Authorization": f"Bearer {tokens['viewer']}"}
        with httpx.Client(verify=trust, headers=looks) as client:
            assert client.get(url(server, "/metrics", "https")).status_code == 200
            assert client.get(url(server, "/v2/health/ready", "https")).status_code == 200
        credentials = grpc.ssl_channel_credentials(
            authority.ca.read_bytes(), worker[1].read_bytes(), worker[0].read_bytes()
        )
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            metadata = (("authorization", headers["Authorization"]),)
            request = message(request_of(QUERY))
            answer = stub.ModelInfer(request, metadata=metadata, timeout=PATIENCE_S)
            assert list(answer.outputs[0].shape) == [6]
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request, timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S).live


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["{model}"],
            "nothing protects this server: pass --insecure to answer callers of this machine; or",
        ),
        (["{model}", "--insecure", "--listen", "0.0.0.0:8080"], "--listen 0.0.0.0:8080 can be"),
        (["{model}", "--insecure", "--listen", "8080"], "--listen is '8080'; allowed is HOST:PORT"),
        (["{model}", "--insecure", "--tokens", "x"], "--insecure was given beside --tokens x; a"),
        (
            ["{model}", "--insecure", "--listen", "127.0.0.1:0", "--workers", "2"],
            "--listen 127.0.0.1:0 takes any free port, which --workers 2 cannot share.",
        ),
        (["{model}/no", "--insecure", "--listen", "{free}"], "{model}/no is no exported model: it"),
        (
            ["{model}", "--insecure", "--listen", "{taken}", "--workers", "2"],
            "cannot serve at --listen {taken}: address already in use. Stop the service",
        ),
    ],
)
def test_a_server_that_cannot_start_says_why(
    server: RunningServer, exported: Path, arguments: list[str], told: str
) -> None:
    places = {
        "model": str(exported),
        "taken": f"127.0.0.1:{server.grpc_port}",
        "free": f"127.0.0.1:{free_port()}",
    }
    result = run_gmeta("serve", *(each.format(**places) for each in arguments))
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"error: {told.format(**places)}"), result.stderr
    assert result.stderr.count("\n") == 1


def test_a_damaged_model_is_not_served(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    table = folder / "table-00000.safetensors"
    table.write_bytes(table.read_bytes()[:-1] + b"\xff")
    for workers in ("1", "2"):
        address = f"127.0.0.1:{free_port()}"
        result = run_gmeta("serve", folder, "--insecure", "--listen", address, "--workers", workers)
        assert result.returncode == 1
        assert "table-00000.safetensors" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_worker_that_is_told_to_end_as_it_starts_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_on(config: ServeConfig, tell: Callable[[int], None]) -> None:
        os._exit(7)

    work = _WorkerGroup._work

    def told_at_once(self: _WorkerGroup, sign: Any) -> None:
        # Before it has a handler of its own: the signal waits, or comes to that of its parent.
        wait_until(lambda: signal.sigpending() or self._stop_flag, "the signal")
        work(self, sign)

    monkeypatch.setattr(_WorkerGroup, "_work", told_at_once)
    workers = _WorkerGroup(ServeConfig(tmp_path, "model"), serve_on, print)
    before = signal.signal(signal.SIGTERM, workers._stop_flag.stop)
    try:
        worker = workers._start()
        worker.process.terminate()
        worker.process.join(PATIENCE_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert worker.process.exitcode == -signal.SIGTERM
