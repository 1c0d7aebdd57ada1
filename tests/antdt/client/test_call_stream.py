"""Calls of a training loop over one stream: the same answers, each request judged by itself."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from gmeta.access.credentials import end_of_certificate
from gmeta.access.errors import RefusedError
from gmeta.antdt.client.call_stream import CallError, CallStream
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.connection import MAX_STREAMED_BYTES
from gmeta.antdt.client.lease import EndOfEpoch
from gmeta.antdt.errors import FencedError
from gmeta.antdt.model import DatasetSpec
from gmeta.antdt.rpc.event_loop import event_loop
from gmeta.antdt.rpc.streamed_calls import STREAMED
from gmeta.antdt.service.edge import ShardServicer
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from tests.antdt.faults.test_network import Proxy
from tests.antdt.pki import Authority
from tests.antdt.slow_rate import limits_by_count
from tests.support.waiting import PATIENCE_S, wait_until

WORKER = "worker-0123456789abcdef"
SPEC = DatasetSpec("d", 40, 4)


class PairsForKeys(Mapping[Any, Any]):
    """Trailing metadata as grpcio 1.76 hands it over: a mapping that iterates over pairs."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter((("gmeta-reason", "SPEC_CONFLICT"),))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> str:
        return {"gmeta-reason": "SPEC_CONFLICT"}[key]


def test_a_refusal_names_its_reason_with_every_grpcio() -> None:
    error = SimpleNamespace(
        trailing_metadata=PairsForKeys,
        code=lambda: grpc.StatusCode.ALREADY_EXISTS,
        details=lambda: "the name stands for other data",
    )
    assert CallError.of(error).reason == "SPEC_CONFLICT"


def test_a_reason_that_only_a_newer_service_knows_is_a_refusal_like_others(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = pb.Refusal(code=9, reason=4321, message="the moon is full")
    monkeypatch.setattr("gmeta.antdt.service.edge.encode_refusal", lambda error: refusal)
    with ShardClient(address, "a") as client:
        with pytest.raises(RefusedError) as refused:
            client.lease("unknown", 0)
        assert (refused.value.code, refused.value.reason) == ("FAILED_PRECONDITION", "4321")
        assert str(refused.value) == "the moon is full"


def registered(stub: Any) -> Any:
    stub.RegisterDataset(
        pb.RegisterDatasetRequest(
            spec=pb.DatasetSpec(name="d", num_units=40, units_per_shard=4, num_epochs=1)
        )
    )
    reply = stub.Register(pb.RegisterRequest(worker_id="a", incarnation="p"))
    return pb.Caller(
        worker_id="a",
        incarnation="p",
        service_epoch=reply.service_epoch,
        run_generation=reply.run_generation,
    )


def calls(server: ShardServer, rpc: str, code: str = "OK") -> float:
    labels = {"rpc": rpc, "code": code}
    return server.edge.metrics.registry.get_sample_value("antdt_calls_total", labels) or 0.0


def num_streams(server: ShardServer) -> float:
    return server.edge.metrics.registry.get_sample_value("antdt_streams") or 0.0


def test_a_stream_carries_each_call_of_a_training_loop(server: ShardServer, stub: Any) -> None:
    who = registered(stub)
    grants = stub.Lease(
        pb.LeaseRequest(caller=who, seq=1, dataset="d", epoch=0, max_shards=3)
    ).grants.grants
    first, second, third = (grant.token for grant in grants)
    asked = {
        "progress": pb.ProgressRequest(
            caller=who, items=[pb.ProgressItem(token=first, units_done=1)]
        ),
        "complete": pb.CompleteRequest(caller=who, seq=2, tokens=[first]),
        "release": pb.ReleaseRequest(caller=who, seq=3, tokens=[second]),
        "fail": pb.FailRequest(caller=who, seq=4, token=third, failure_class="x", message="y"),
        "heartbeat": pb.HeartbeatRequest(caller=who, tokens=[first]),
        "lease": pb.LeaseRequest(caller=who, seq=5, dataset="d", epoch=0, max_shards=1),
    }
    assert set(asked) == set(STREAMED.values())
    requests = [
        pb.StreamRequest(call_id=7 + number, **{field: request})
        for number, (field, request) in enumerate(asked.items())
    ]
    answers = list(stub.Stream(iter(requests)))
    assert [answer.call_id for answer in answers] == [request.call_id for request in requests]
    assert [answer.WhichOneof("answer") for answer in answers] == list(asked)
    by_name = {answer.WhichOneof("answer"): answer for answer in answers}
    assert list(by_name["complete"].complete.outcomes) == [pb.OUTCOME_ACCEPTED]
    assert list(by_name["heartbeat"].heartbeat.revoked_tokens) == [first]
    assert by_name["lease"].lease.last_seq == 5
    # The same number again, as a call of its own: the two ways share one numbering.
    assert stub.Lease(asked["lease"]).grants == by_name["lease"].lease.grants
    assert calls(server, "Lease") == 3


def test_a_refusal_says_what_the_status_of_the_call_would_and_the_stream_goes_on(stub: Any) -> None:
    who = registered(stub)
    wrong = pb.LeaseRequest(caller=who, seq=1, dataset="x", max_shards=1)
    with pytest.raises(grpc.RpcError) as status:
        stub.Lease(wrong)
    right = pb.LeaseRequest(caller=who, seq=1, dataset="d", max_shards=1)
    requests = [
        pb.StreamRequest(call_id=1, lease=wrong),
        pb.StreamRequest(call_id=2),
        pb.StreamRequest(call_id=3, lease=right),
    ]
    refused, nameless, granted = stub.Stream(iter(requests))
    error: Any = status.value
    assert refused.refusal == pb.Refusal(
        code=error.code().value[0], reason="REASON_UNKNOWN_DATASET", message=error.details()
    )
    assert nameless.refusal == pb.Refusal(
        code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
        reason="REASON_BAD_ARGUMENT",
        message="the request names no call that this service knows; allowed are Lease, Heartbeat, "
        "Progress, Complete, Release, Fail. Make other calls one by one.",
    )
    assert len(granted.lease.grants.grants) == 1


def test_a_client_opens_one_stream_for_all_its_threads(server: ShardServer) -> None:
    with ShardClient(server.address, "a") as client:
        client.register_dataset(DatasetSpec("d", 400, 1))
        seen: list[list[int]] = [[] for _ in range(4)]

        def take(mine: list[int]) -> None:
            for _ in range(20):
                answer = client.lease("d", 0)
                assert isinstance(answer, list)
                mine += [lease.shard_index for lease in answer]
                for lease in answer:
                    lease.advance(1)
                client.flush()

        threads = [threading.Thread(target=take, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert num_streams(server) == 1
        taken = [shard for mine in seen for shard in mine]
        assert len(taken) == len(set(taken)) == 80
        assert calls(server, "Lease") == 80
    (dataset,) = server.edge.read_status().datasets
    assert dataset.done_open == 80


def test_a_fence_stops_a_client_over_its_open_stream(server: ShardServer) -> None:
    with ShardClient(server.address, "a") as old:
        old.register_dataset(SPEC)
        old.lease("d", 0)
        with ShardClient(server.address, "a"), pytest.raises(FencedError) as fenced:
            old.lease("d", 0)
    assert fenced.value.reason == "FENCED_INCARNATION"


def one_epoch(address: str, name: str) -> list[int]:
    taken = []
    with ShardClient(address, name) as client:
        client.register_dataset(SPEC)
        while not isinstance(answer := client.lease("d", 0), EndOfEpoch):
            assert isinstance(answer, list)
            for lease in answer:
                lease.advance(lease.num_units)
                taken.append(lease.shard_index)
            client.flush()
    return taken


def test_a_service_without_streams_is_called_call_by_call_and_the_log_says_so(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unknown(self: ShardServicer, requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    monkeypatch.setattr(ShardServicer, "Stream", unknown)
    older = ShardServer(ServiceConfig("127.0.0.1:0"))
    with caplog.at_level(logging.WARNING, "gmeta.antdt.client"):
        assert sorted(one_epoch(older.address, "a")) == list(range(10))
    older.stop(0.0)
    assert caplog.messages == [
        f"the shard service at {older.address} takes no stream (Method not found!): its calls are "
        "made one by one, for twice the CPU"
    ]


def test_a_client_beyond_the_limit_of_streams_makes_its_calls_one_by_one(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gmeta.antdt.service.edge.MAX_STREAMS", 1)
    with ShardClient(server.address, "first") as first:
        first.register_dataset(SPEC)
        first.lease("d", 0)
        caplog.set_level(logging.WARNING, "gmeta.antdt.client")
        with ShardClient(server.address, "second") as second:
            assert isinstance(second.lease("d", 0), list)
            assert num_streams(server) == 1
    assert caplog.messages == [
        f"the shard service at {server.address} takes no stream (1 streams are open; no more are "
        "taken. Make the calls one by one.): its calls are made one by one, for twice the CPU"
    ]


def test_a_drain_ends_idle_streams_and_does_not_wait_for_their_clients(server: ShardServer) -> None:
    other = ShardServer(ServiceConfig("127.0.0.1:0"))
    with ShardClient(other.address, "a", outage_budget_s=0.2) as client:
        client.register_dataset(SPEC)
        client.lease("d", 0)
        stopping = threading.Thread(target=other.stop, args=(300.0,))
        stopping.start()
        stopping.join(PATIENCE_S)  # of the 300 s that calls under way would have
        assert not stopping.is_alive()


def test_a_message_too_large_for_a_stream_harms_no_other_call(server: ShardServer) -> None:
    with ShardClient(server.address, "a") as client:
        client.register_dataset(SPEC)
        answer = client.lease("d", 0, 2)
        assert isinstance(answer, list)
        client.fail(answer[0], "x", "y" * MAX_STREAMED_BYTES)
        with pytest.raises(RefusedError, match="larger than max"):
            client.fail(answer[1], "x", "y" * (17 << 20))
        assert isinstance(client.lease("d", 0), list)
        assert num_streams(server) == 1


def test_an_answer_that_never_comes_fails_and_a_repeated_call_gets_it(server: ShardServer) -> None:
    proxy = Proxy(server.port)
    with ShardClient(proxy.address, "a", outage_budget_s=PATIENCE_S) as client:
        client.register_dataset(SPEC)
        client.lease("d", 0)
        config = client._session.connection._config.__dict__
        proxy.swallow_replies, config["call_timeout_s"] = True, 0.3
        leases: list[Any] = []
        waiting = threading.Thread(target=lambda: leases.append(client.lease("d", 0)))
        waiting.start()
        # The call, and once more over another stream.
        wait_until(lambda: calls(server, "Lease") >= 3)
        config["call_timeout_s"] = PATIENCE_S
        proxy.swallow_replies = False
        proxy.cut()
        waiting.join(PATIENCE_S)
        (status,) = server.edge.read_status().datasets
        assert (len(leases), status.doing) == (1, 2)
    proxy.close()


def test_what_a_stream_has_not_answered_fails_when_it_ends(server: ShardServer) -> None:
    ended = threading.Event()

    class Silent:
        """A service that takes requests and never answers."""

        def Stream(self, metadata: Any) -> Any:
            return self

        async def read(self) -> Any:
            while not ended.is_set():
                await asyncio.sleep(0.01)
            return grpc.aio.EOF

        async def write(self, message: Any) -> None:
            ended.set()

        def cancel(self) -> None:
            pass

    stream = CallStream(Silent(), ())
    for _ in range(2):  # also what is asked afterwards
        with pytest.raises(CallError) as broken:
            stream.call("Heartbeat", pb.HeartbeatRequest(), 60.0)
        assert (broken.value.code, broken.value.of_stream) == (grpc.StatusCode.UNAVAILABLE, True)
    assert stream.ended


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "worker").write_text(WORKER)
    return folder


def test_a_withdrawn_token_is_refused_at_the_next_request_and_a_new_one_opens_a_new_stream(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gmeta.access.auth._RELOAD_EVERY_S", 0.0)
    mine, fresh = tmp_path / "mine", "fresh-0123456789abcdef"
    mine.write_text(WORKER)
    server = ShardServer(ServiceConfig("127.0.0.1:0", tokens=tokens))
    with ShardClient(server.address, "a", token_file=mine) as client:
        client.register_dataset(SPEC)
        client.lease("d", 0)
        (tokens / "worker").write_text(fresh)
        with pytest.raises(RefusedError) as stranger:
            client.lease("d", 0)
        assert stranger.value.code == "UNAUTHENTICATED"
        assert calls(server, "Lease", "UNAUTHENTICATED") == 1
        mine.write_text(fresh)
        assert isinstance(client.lease("d", 0), list)
        # The old one is not left open.
        wait_until(lambda: num_streams(server) == 1)
    server.stop(0.0)


def test_a_certificate_that_expires_under_an_open_stream_is_refused_until_it_is_replaced(
    pki: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = pki.issue("service", days=9.0)
    live = (tmp_path / "client.crt", tmp_path / "client.key")

    def replace(days: float) -> None:
        for path, made in zip(live, pki.issue(f"rank0-{days}", "worker", days), strict=True):
            path.write_bytes(made.read_bytes())

    replace(1.0)
    server = ShardServer(
        ServiceConfig("127.0.0.1:0", tls_cert=cert, tls_key=key, tls_client_ca=pki.ca)
    )
    with ShardClient(
        server.address, "a", tls_ca=pki.ca, tls_cert=live[0], tls_key=live[1]
    ) as client:
        client.register_dataset(SPEC)
        client.lease("d", 0)
        late_s = end_of_certificate(live[0].read_bytes()) + 100
        clock = SimpleNamespace(time=lambda: late_s, monotonic=time.monotonic)
        monkeypatch.setattr("gmeta.access.auth.time", clock)
        with pytest.raises(RefusedError) as expired:
            client.lease("d", 0)
        assert expired.value.code == "UNAUTHENTICATED"
        assert str(expired.value) == (
            "the client certificate of this connection expired 100 s ago. Replace its file: the "
            "client connects again with the new one."
        )
        replace(5.0)
        assert isinstance(client.lease("d", 0), list)
    server.stop(0.0)


def test_each_request_of_a_stream_counts_against_its_connections_rate(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gmeta.antdt.service.shard_server.CallLimits", limits_by_count)
    server = ShardServer(ServiceConfig("127.0.0.1:0", tokens=tokens))
    with ShardClient(server.address, "a", token_file=tokens / "worker") as client:
        client.register_dataset(SPEC)
        for _ in range(10):
            assert isinstance(client.lease("d", 0), list)
        assert calls(server, "Lease") == 10
        assert calls(server, "Lease", "RESOURCE_EXHAUSTED") > 0
    server.stop(0.0)


@pytest.mark.parametrize("year", [2049, 2050])  # where the form of the date changes
def test_the_end_of_a_certificate_is_read_as_a_library_reads_it(pki: Authority, year: int) -> None:
    name = x509.Name([])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(pki.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(year, 6, 7, 8, 9, 10, tzinfo=UTC))
        .sign(pki.key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    assert end_of_certificate(pem) == made.not_valid_after_utc.timestamp()


def test_a_stream_closed_before_it_began_refuses_calls_at_once(stub: Any) -> None:
    """As two threads do it, of which one takes new credentials."""
    held = threading.Event()
    event_loop().call_soon_threadsafe(held.wait, PATIENCE_S)
    try:
        stream = CallStream(stub, ())
        stream.close()
        has_ended = stream.ended
    finally:
        held.set()
    assert has_ended
    with pytest.raises(CallError) as refused:
        stream.call("Lease", pb.LeaseRequest(), 5.0)
    assert (refused.value.code, refused.value.of_stream) == (grpc.StatusCode.UNAVAILABLE, True)
