"""The edge over real sockets: wrong, huge and foreign calls; how the process starts and ends."""

import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from gmeta.access.address import AddressError
from gmeta.access.errors import RefusedError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.errors import StoreTakenError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.rpc import operator_views as views
from gmeta.antdt.service.edge import ShardServicer
from gmeta.antdt.service.shard_server import SERVICE_NAME, ServiceConfig, ShardServer
from gmeta.cli.main import app
from gmeta.errors import UserError
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from tests.antdt.driver import FakeClock
from tests.antdt.faults.service_process import free_port, running
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S

SERVE = (
    "import typer; from gmeta.cli.commands.shard_service import shard_service; "
    "typer.run(shard_service)"
)


def refused(call: Callable[[], Any]) -> tuple[str, str, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    status: Any = error.value
    reason = dict(status.trailing_metadata() or ()).get("gmeta-reason", "")
    return status.code().name, str(reason), status.details()


def caller(stub: Any, worker_id: str = "a") -> Any:
    reply = stub.Register(pb.RegisterRequest(worker_id=worker_id, incarnation="p"))
    return pb.Caller(
        worker_id=worker_id,
        incarnation="p",
        service_epoch=reply.service_epoch,
        run_generation=reply.run_generation,
    )


SPEC = pb.DatasetSpec(name="d", num_units=8, units_per_shard=4, num_epochs=1)


def test_malformed_and_foreign_tokens_are_fenced_one_by_one(stub: Any) -> None:
    stub.RegisterDataset(pb.RegisterDatasetRequest(spec=SPEC))
    who = caller(stub)
    granted = stub.Lease(pb.LeaseRequest(caller=who, seq=1, dataset="d", max_shards=1))
    token = granted.grants.grants[0].token
    request = pb.CompleteRequest(caller=who, seq=2, tokens=[0, 2**64 - 1, token + 1, token])
    assert list(stub.Complete(request).outcomes) == [pb.OUTCOME_FENCED] * 3 + [pb.OUTCOME_ACCEPTED]


def test_lists_are_bounded(stub: Any) -> None:
    who = caller(stub)
    request = pb.CompleteRequest(caller=who, seq=1, tokens=range(70_000))
    assert refused(lambda: stub.Complete(request)) == (
        "INVALID_ARGUMENT",
        "BAD_ARGUMENT",
        "tokens has 70000 entries; allowed are 0 to 65536. Split the call.",
    )
    lease = pb.LeaseRequest(caller=who, seq=1, dataset="d", max_shards=257)
    found = refused(lambda: stub.Lease(lease))[2]
    assert found == "max_shards is 257; allowed is 1 to 256. Correct the request."
    many = pb.HeartbeatRequest(caller=who, readings=[pb.Reading()] * 65)
    found = refused(lambda: stub.Heartbeat(many))[2]
    assert found == "readings has 65 entries; allowed are 0 to 64. Split the call."
    wide = pb.Reading(values={f"loss-{number}": 1.0 for number in range(65)})
    found = refused(lambda: stub.Heartbeat(pb.HeartbeatRequest(caller=who, readings=[wide])))[2]
    assert found == "values has 65 entries; allowed are 0 to 64. Split the call."
    long = pb.Reading(values={"l" * 129: 1.0})
    found = refused(lambda: stub.Heartbeat(pb.HeartbeatRequest(caller=who, readings=[long])))[2]
    assert found == "the name of a value has 129 characters; at most 128 are allowed. Shorten it."


def test_a_huge_message_is_refused_and_the_service_goes_on(stub: Any) -> None:
    asked = pb.RestoreRequest(caller=caller(stub), manifest_json=b"x" * (17 << 20), restore_id="r")
    code, _, message = refused(lambda: stub.Restore(asked))
    assert code == "RESOURCE_EXHAUSTED"
    assert "larger than max" in message
    assert stub.Status(pb.StatusRequest()).service_epoch == 1


def test_skip_needs_a_reason(stub: Any) -> None:
    request = pb.SkipRequest(request_id="r", dataset="d", shard_indices=[1], reason=" ")
    assert refused(lambda: stub.Skip(request))[2] == (
        "the reason is empty; a skipped shard is data that the model never sees, and needs one. "
        "Say why: gmeta shards skip SHARD --reason TEXT."
    )


def test_list_shards_pages_through_all_of_them_by_state(stub: Any) -> None:
    stub.RegisterDataset(pb.RegisterDatasetRequest(spec=SPEC))
    who = caller(stub)
    stub.Lease(pb.LeaseRequest(caller=who, seq=1, dataset="d", max_shards=1))
    first = stub.ListShards(pb.ListShardsRequest(dataset="d", page_size=1))
    rest = stub.ListShards(pb.ListShardsRequest(dataset="d", page_token=first.next_page_token))
    found = [*first.shards, *rest.shards]
    assert sorted(shard.shard_index for shard in found) == [0, 1]
    assert [shard.worker_id for shard in found] == ["a", ""]
    todo = stub.ListShards(pb.ListShardsRequest(dataset="d", state=pb.SHARD_STATE_TODO)).shards
    assert [shard.position for shard in todo] == [1]
    bad = pb.ListShardsRequest(dataset="d", page_size=1001, page_token="x")
    assert refused(lambda: stub.ListShards(bad))[:2] == ("INVALID_ARGUMENT", "BAD_ARGUMENT")


def test_workers_and_leases_are_counted_beyond_those_that_are_listed(server: ShardServer) -> None:
    server.edge.ask(cmd.RegisterDataset(DatasetSpec("d", 8, 4)))
    for number in range(1001):
        reply = server.edge.ask(cmd.Register(f"w{number:04d}", "p", None))
    caller = Caller("w1000", "p", reply.service_epoch, reply.run_generation)
    server.edge.ask(cmd.LeaseShards(caller, 1, "d", 0, 2))
    status = server.edge.read_status()
    assert (len(status.workers), status.num_workers, status.num_leases) == (1000, 1001, 2)
    found = {
        sample.name: sample.value
        for family in server.edge.metrics.registry.collect()
        for sample in family.samples
    }
    assert (found["antdt_workers"], found["antdt_leases"]) == (1001, 2)


def ipv6_is_here() -> bool:
    """Python may know IPv6 where the system has it turned off, as containers often do."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6_is_here(), reason="this machine has no IPv6")
def test_the_metrics_listen_on_ipv6_too() -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0", metrics_listen="[::1]:0"))
    try:
        with urllib.request.urlopen(f"http://[::1]:{server.metrics_port}/healthz") as answer:
            assert answer.read() == b"serving\n"
    finally:
        server.stop(0.0)


def test_a_refusal_names_no_more_than_its_status_can_carry(stub: Any) -> None:
    for number in range(200):
        name = f"{number:03d}-" + "x" * 120
        spec = pb.DatasetSpec(name=name, num_units=8, units_per_shard=4, num_epochs=1)
        stub.RegisterDataset(pb.RegisterDatasetRequest(spec=spec))
    request = pb.LeaseRequest(caller=caller(stub), seq=1, dataset="y", max_shards=1)
    assert refused(lambda: stub.Lease(request))[:2] == ("NOT_FOUND", "UNKNOWN_DATASET")


def test_done_is_committed_only_by_the_checkpoint(server: ShardServer, stub: Any) -> None:
    with ShardClient(server.address, "a") as client:
        client.register_dataset(DatasetSpec("d", 8, 4))
        (lease,) = client.lease("d", 0)
        lease.advance(4)
        client.flush()
        manifest = client.prepare_checkpoint("c", 1)
        before = stub.Status(pb.StatusRequest()).datasets[0]
        client.commit_checkpoint(manifest)
        after = stub.Status(pb.StatusRequest()).datasets[0]
    assert (before.done_open, before.done_committed) == (1, 0)
    assert (after.done_open, after.done_committed) == (0, 1)
    audit = stub.Audit(pb.AuditRequest(checkpoint_id="c"))
    assert audit.ok
    assert audit.manifest_json.decode() == manifest.to_json()


def test_the_service_serves_while_an_audit_is_worked_out(
    server: ShardServer, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a manifest of any size: an audit waits here until heartbeats were answered."""
    began, go_on, threads = threading.Event(), threading.Event(), list[str]()
    real = views.audit_manifest

    def held_up(manifest: Any) -> Any:
        threads.append(threading.current_thread().name)
        began.set()
        assert go_on.wait(PATIENCE_S)
        return real(manifest)

    monkeypatch.setattr(views, "audit_manifest", held_up)
    stub.RegisterDataset(pb.RegisterDatasetRequest(spec=SPEC))
    who = caller(stub)
    stub.PrepareCheckpoint(pb.PrepareCheckpointRequest(caller=who, checkpoint_id="c", step=1))
    audits = [stub.Audit.future(pb.AuditRequest(checkpoint_id="c")) for _ in range(3)]
    assert began.wait(PATIENCE_S)
    for _ in range(5):
        stub.Heartbeat(pb.HeartbeatRequest(caller=who))
    assert len(threads) == 1  # one at a time: each takes memory
    go_on.set()
    assert all(audit.result(PATIENCE_S).ok for audit in audits)
    assert not {"antdt-writer", "MainThread"} & set(threads)


def test_watch_streams_statuses_and_is_bounded(stub: Any) -> None:
    stream = stub.Watch(pb.WatchRequest(interval_ms=200))
    assert [next(stream).status.service_epoch for _ in range(2)] == [1, 1]
    stream.cancel()
    found = refused(lambda: next(stub.Watch(pb.WatchRequest(interval_ms=1))))[2]
    assert found == "interval_ms is 1; allowed is 200 to 60000. Correct the request."
    watchers = [stub.Watch(pb.WatchRequest()) for _ in range(9)]
    answers = []
    for watcher in watchers:
        try:
            next(watcher)
            answers.append("OK")
        except grpc.RpcError as error:
            answers.append(error.details())
    for watcher in watchers:
        watcher.cancel()
    assert "8 callers are watching; no more are taken. Use Status, or scrape /metrics." in answers


def test_health_and_reflection_answer(server: ShardServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([request]))
        names = {service.name for service in answer.list_services_response.service}
    expected = {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert names == expected


def test_metrics_count_calls_and_shards(server: ShardServer, stub: Any) -> None:
    stub.RegisterDataset(pb.RegisterDatasetRequest(spec=SPEC))
    refused(lambda: stub.Audit(pb.AuditRequest(checkpoint_id="x")))
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    assert 'antdt_shards{dataset="d",state="todo"} 2.0' in lines
    assert 'antdt_calls_total{code="NOT_FOUND",rpc="Audit"} 1.0' in lines


def test_a_second_service_on_the_store_or_the_port_fails_at_once(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    first = ShardServer(ServiceConfig("127.0.0.1:0", store))
    with pytest.raises(StoreTakenError):
        ShardServer(ServiceConfig("127.0.0.1:0", store))
    assert catch_message(AddressError, ShardServer, ServiceConfig(first.address)) == (
        f"cannot serve at --listen {first.address}: address already in use. Stop the service "
        "that has it, or choose another port."
    )
    with ShardClient(first.address, "a") as client:
        assert client.register_dataset(DatasetSpec("d", 8, 4)) == 2
    first.stop(0.0)


def test_an_old_service_whose_store_was_taken_answers_nothing_more(tmp_path: Path) -> None:
    config = ServiceConfig("127.0.0.1:0", f"sqlite:///{tmp_path}/s.db")
    old = ShardServer(config)
    client = ShardClient(old.address, "a", outage_budget_s=0.3)
    (tmp_path / "s.db.lock").unlink()
    new = ShardServer(config)
    with pytest.raises(Exception, match="did not answer RegisterDataset"):
        client.register_dataset(DatasetSpec("d", 8, 4))
    assert old.ended.wait(PATIENCE_S)
    client.close()
    new.stop(0.0)
    old.stop(0.0)


@pytest.mark.parametrize("address", ["7070", ":7070", "host:", "host:99999", "host:x"])
def test_an_address_that_is_none_is_explained(address: str) -> None:
    assert catch_message(AddressError, ShardServer, ServiceConfig(address)) == (
        f"--listen is {address!r}; allowed is HOST:PORT with a port from 0 (any free one) to "
        "65535, such as 0.0.0.0:7070. Correct it."
    )
    assert catch_message(AddressError, ShardClient, address, "a") == (
        f"the service's address is {address!r}; allowed is HOST:PORT with a port from 1 to 65535, "
        "such as 127.0.0.1:7070. Correct it."
    )


def test_metrics_that_cannot_be_served_end_the_start_and_free_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError) as busy:
            ShardServer(ServiceConfig("127.0.0.1:0", url, metrics_listen=address))
    assert str(busy.value) == (
        f"cannot listen on {address} for metrics: Address already in use. Choose another "
        "--metrics-listen."
    )
    ShardServer(ServiceConfig("127.0.0.1:0", url)).stop(0.0)


def test_no_report_puts_a_number_unknown_to_json_on_it(server: ShardServer, stub: Any) -> None:
    """Sums and ratios of the most and the least that a report may hold stay finite."""
    clock = server.governor._clock = FakeClock(time.monotonic())
    callers = [caller(stub, name) for name in "abc"]
    for number in range(1, 40):
        for worker, each in enumerate(callers):
            # The first takes no time at all, the second all of it, the third each in turn.
            ms = 5e-324 * number if worker == 0 or number * worker % 2 else 1e15
            report = pb.WorkerReport(
                step=number, tasks_done=(1 << 63) + number, compute_ms=ms, share=4
            )
            nothing = pb.Reading(step=number, values={"loss": math.nan, "valid/auc": math.inf})
            stub.Heartbeat(pb.HeartbeatRequest(caller=each, report=report, readings=[nothing]))
        clock.advance(2 * server.config.stragglers.monitor.window_s)
        server.governor.tick()
    document = server._dashboard.document()
    assert [row["name"] for row in document["workers"]]
    json.dumps(document, allow_nan=False)  # raises ValueError for NaN and for an infinity
    for family in server.edge.metrics.registry.collect():
        assert all(math.isfinite(sample.value) for sample in family.samples), family.name


def test_a_service_that_still_reads_its_store_asks_for_a_moment() -> None:
    with pytest.raises(RefusedError) as early:
        ShardServicer(lease_ttl_s=30.0).ask(cmd.Tick())
    assert (early.value.code, early.value.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
    assert str(early.value) == "the service is recovering its store; retry in a moment."
    assert ShardServicer(lease_ttl_s=30.0).read_status() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--store", "sqlite:////proc/x/s.db"],
            "the store /proc/x/s.db cannot be created: No such file or directory. Name a file in a "
            "writable folder with --store.",
        ),
        (
            ["--antdt-config", "{folder}/none.toml"],
            "config '{folder}/none.toml' cannot be read: No such file or directory. Give a TOML "
            "file",
        ),
    ],
)
def test_a_wrong_option_is_told_at_once(tmp_path: Path, arguments: list[str], message: str) -> None:
    given = [each.format(folder=tmp_path) for each in arguments]
    command = ["shard-service", "--insecure", "--listen", "127.0.0.1:0", "--store", "memory:"]
    with pytest.raises(UserError) as wrong:
        CliRunner().invoke(app, [*command, *given], catch_exceptions=False)
    assert str(wrong.value) == message.format(folder=tmp_path)


def test_sigterm_drains_and_the_next_start_finds_everything(tmp_path: Path) -> None:
    with running(tmp_path / "s.db") as service:
        with ShardClient(service.address, "a") as client:
            client.register_dataset(DatasetSpec("d", 8, 4))
            (lease,) = client.lease("d", 0)
            lease.advance(3)
            client.flush()
            assert service.terminate() == 0
            service.start()
            lease.advance(1)
            client.flush()
            assert client.service_epoch == 2
        service.wait_until_serving()


def test_the_command_serves_logs_json_and_exits_zero_on_sigterm(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVE, "--listen", f"127.0.0.1:{port}"]
    command += ["--store", f"sqlite:///{tmp_path}/s.db", "--insecure"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        ShardClient(f"127.0.0.1:{port}", "a", outage_budget_s=PATIENCE_S).close()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    told = [json.loads(line) for line in log.splitlines()]
    # A call that comes before the store has been read is refused, and made again.
    events = [line for line in told if line["event"] != "refused"]
    assert [line["event"] for line in events] == ["serving", "Register", "draining", "stopped"]
    assert events[0]["service_epoch"] == 1


def test_a_signal_in_the_middle_of_a_wait_ends_the_service_too() -> None:
    code = (
        "import sys\n"
        "from gmeta.antdt.service.shard_server import ServiceConfig, serve_until_signal as serve\n"
        "from tests.support.interrupted import interrupted\n"
        "config = ServiceConfig('127.0.0.1:0')\n"
        "sys.exit(interrupted(lambda: serve(config), serve.__code__))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0
