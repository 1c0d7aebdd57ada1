"""ShardClient, Lease and ShardFeed against a real service in this process."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gmeta.access.errors import RefusedError
from gmeta.antdt import (
    DatasetSpec,
    LeaseLostError,
    ServiceUnavailableError,
    ShardClient,
    ShardFeed,
    load_manifest,
)
from gmeta.antdt.client.held_leases import HeldLeases
from gmeta.antdt.client.lease import Lease, WaitFor
from gmeta.antdt.client.session import CLOSING_BUDGET_S
from gmeta.antdt.model import Grant
from gmeta.antdt.reports import Report
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.antdt.storage.request import LedgerView
from tests.antdt.faults.service_process import free_port
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def client(address: str) -> Iterator[ShardClient]:
    with ShardClient(address, "a") as made:
        made.register_dataset(DatasetSpec("d", 10, 4, seed=2))
        yield made


def test_an_answer_that_came_late_shortens_no_lease() -> None:
    held, grant = HeldLeases(), Grant(7, "d", 0, 0, 0, 4, 0, 0)
    held.add([Lease(grant, usable_until_s=100.0)])
    held.apply_renewal(90.0, {7}, lost_tokens=set())  # to a heartbeat that left before the grant
    assert [lease.usable_until_s for lease in held.live()] == [100.0]
    held.apply_renewal(110.0, {7}, lost_tokens=set())
    assert [lease.usable_until_s for lease in held.live()] == [110.0]


def test_a_lease_that_a_heartbeat_did_not_name_is_not_renewed_by_its_answer() -> None:
    """Its grant was under way: the service counts its time from before the heartbeat."""
    held = HeldLeases()
    held.add([Lease(Grant(token, "d", 0, token, 0, 4, 0, 0), 100.0) for token in (7, 8)])
    held.apply_renewal(110.0, {7}, lost_tokens=set())
    assert [lease.usable_until_s for lease in held.live()] == [110.0, 100.0]


def test_units_of_all_shards_are_those_of_the_dataset(client: ShardClient) -> None:
    units = [unit for lease in client.shards("d") for unit in lease.units()]
    assert sorted(units) == list(range(10))
    assert client.held == []


def test_a_late_answer_to_register_does_not_take_a_call_number_back(client: ShardClient) -> None:
    connection = client._session.connection
    call = connection.call

    def overtaken(rpc: str, *arguments: Any, **named: Any) -> Any:
        response = call(rpc, *arguments, **named)
        connection.call = call  # type: ignore[method-assign]
        client.lease("d", 0, 1)  # another thread's, sent and answered meanwhile
        return response

    connection.call = overtaken  # type: ignore[method-assign]
    client._session.register()
    assert isinstance(client.lease("d", 0, 2), list)


def test_a_late_answer_to_register_does_not_take_a_lease_away_that_was_granted_meanwhile(
    client: ShardClient,
) -> None:
    """The service holds it for this worker: nobody else would get it before it expires."""
    connection = client._session.connection
    call = connection.call
    taken: list[Any] = []

    def overtaken(rpc: str, *arguments: Any, **named: Any) -> Any:
        response = call(rpc, *arguments, **named)
        connection.call = call  # type: ignore[method-assign]
        taken.extend(client.lease("d", 0, 1))  # type: ignore[arg-type]
        return response

    connection.call = overtaken  # type: ignore[method-assign]
    client._session.register()
    taken[0].advance(taken[0].num_units)
    assert client.held == taken


def test_a_lease_lost_while_its_progress_is_reported_stays_lost(client: ShardClient) -> None:
    """Nobody would complete it otherwise, and the next one to get it would train it again."""
    (lease,) = client.lease("d", 0)
    lease.advance(1)
    connection = client._session.connection
    call = connection.call

    def revoked(rpc: str, *arguments: Any) -> Any:
        response = call(rpc, *arguments)
        client._session.apply_renewal(time.monotonic(), {lease.token}, {lease.token})
        return response

    connection.call = revoked  # type: ignore[method-assign]
    client.flush()
    connection.call = call  # type: ignore[method-assign]
    with pytest.raises(LeaseLostError):
        lease.advance(1)


@pytest.mark.parametrize("answered", ["before Register is sent", "while Register is under way"])
def test_an_answer_of_the_service_before_a_restart_does_not_set_the_next_number(
    tmp_path: Path, answered: str
) -> None:
    """A WAIT leaves no trace on the disk, so its number counts for nothing in the next service;
    the thread that got it may go on only after the heartbeat's has registered there."""
    config = ServiceConfig(f"127.0.0.1:{free_port()}", f"sqlite:///{tmp_path}/s.db")
    services = [ShardServer(config)]

    def restart() -> None:
        services.pop().stop(0.0)
        services.append(ShardServer(config))

    with ShardClient(services[0].address, "holder") as holder:
        holder.register_dataset(DatasetSpec("d", 1, 1))
        with ShardClient(services[0].address, "a") as client:
            holder.lease("d", 0)
            connection = client._session.connection
            call = connection.call

            def register_first(rpc: str, *arguments: Any) -> Any:
                response = call(rpc, *arguments)
                connection.call = call  # type: ignore[method-assign]
                restart()
                client._session.register()
                return response

            def register_late(rpc: str, *arguments: Any, **named: Any) -> Any:
                connection.call = call  # type: ignore[method-assign]
                client.lease("d", 0)
                restart()
                return call(rpc, *arguments, **named)

            if answered == "before Register is sent":
                connection.call = register_first  # type: ignore[method-assign]
                client.lease("d", 0)
            else:
                connection.call = register_late  # type: ignore[method-assign]
                client._session.register()
            assert isinstance(client.lease("d", 0), WaitFor)
            holder.release(holder.held)
            assert isinstance(client.lease("d", 0), list)
    services.pop().stop(0.0)


def test_flushed_progress_survives_a_release(client: ShardClient) -> None:
    (lease,) = client.lease("d", 0)
    lease.advance(3)
    client.flush()
    client.release([lease])
    (again,) = client.lease("d", 0)
    assert (again.shard_index, list(again.units())) == (lease.shard_index, [lease.start_unit + 3])


def test_leaving_the_client_gives_its_shards_back(address: str, client: ShardClient) -> None:
    with ShardClient(address, "b") as other:
        taken = other.lease("d", 0, 3)
        assert len(taken) == 3
    assert {lease.shard_index for lease in client.lease("d", 0, 3)} == {0, 1, 2}


def test_a_restore_ends_each_lease_and_fences_the_others(address: str, client: ShardClient) -> None:
    (lease,) = client.lease("d", 0)
    lease.advance(1)
    generation = client.run_generation
    assert client.restore(None) == generation + 1
    assert catch_message(LeaseLostError, lease.check) == (
        f"the lease of shard {lease.shard_index} of dataset 'd' is lost: the job was rolled back "
        "to a checkpoint. Only a live lease may be trained: in a synchronous job stop this "
        "process and restart from the checkpoint."
    )
    client.flush()
    assert sum(len(list(lease.units())) for lease in client.shards("d")) == 10


def test_a_flush_raises_where_units_are_of_a_lost_lease(address: str, client: ShardClient) -> None:
    """Without the error a checkpoint could hold units that the manifest does not know."""
    (lease,) = client.lease("d", 0)
    lease.advance(2)
    client._session.apply_renewal(time.monotonic(), {lease.token}, {lease.token})
    with pytest.raises(LeaseLostError):
        client.flush()


def test_the_manifest_file_restores_what_was_flushed(client: ShardClient, tmp_path: Path) -> None:
    first, second = client.lease("d", 0, 2)
    first.advance(first.num_units)
    second.advance(1)
    client.flush()
    saved = client.prepare_checkpoint("c", 7)
    assert load_manifest(saved.save(tmp_path).parent) == saved
    client.restore(load_manifest(tmp_path))
    left = [unit for lease in client.shards("d") for unit in lease.units()]
    assert len(left) == 10 - first.num_units - 1


def test_a_failed_shard_is_offered_again(client: ShardClient) -> None:
    (lease,) = client.lease("d", 0)
    assert client.fail(lease, "corrupt-page", "page 3") is False
    (again,) = client.lease("d", 0)
    assert (again.shard_index, again.attempts) == (lease.shard_index, 1)


def test_what_is_in_the_model_of_a_failed_shard_is_not_offered_again(client: ShardClient) -> None:
    (lease,) = client.lease("d", 0)
    lease.advance(2)
    client.fail(lease, "corrupt-page", "page 3")
    (again,) = client.lease("d", 0)
    assert (again.shard_index, again.units_done) == (lease.shard_index, 2)


def test_a_service_that_never_answers_is_an_error_that_says_so() -> None:
    port = free_port()
    assert catch_message(
        ServiceUnavailableError, ShardClient, f"127.0.0.1:{port}", "a", outage_budget_s=0.3
    ).startswith(f"the shard service at 127.0.0.1:{port} did not answer Register for ")


def test_a_proxy_is_not_asked_for_a_service_on_this_machine(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")  # nobody is there
    with ShardClient(address, "a", outage_budget_s=1.0) as client:
        assert client.service_epoch == 1


def test_reports_reach_the_status(address: str) -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    with ShardClient(server.address, "a") as client:
        client.report(Report(step=7, tasks_done=56, compute_ms=1.5), share=8)
        wait_until(lambda: server.edge.read_status().workers[0].report.step)
        (worker,) = server.edge.read_status().workers
    assert (worker.report.step, worker.report.compute_ms, worker.report.share) == (7, 1.5, 8)
    server.stop(0.0)


def test_a_feed_leases_ahead_and_ends_when_all_is_done(client: ShardClient) -> None:
    feed = ShardFeed(client, "d", 0, prefetch_shards=2)
    units: list[int] = []

    def train_what_is_ready() -> bool:
        lease = feed.poll()
        if lease is not None:  # a rank without a shard feeds an empty batch
            units.extend(lease.units())
            lease.advance(lease.num_units)
            client.flush()
        return feed.ended

    wait_until(train_what_is_ready)
    assert sorted(units) == list(range(10))
    feed.close()


def test_a_closed_feed_gives_back_what_was_not_taken(address: str, client: ShardClient) -> None:
    feed = ShardFeed(client, "d", 0, prefetch_shards=3)
    wait_until(lambda: len(client.held) == 3)
    feed.close()
    assert len(client.lease("d", 0, 3)) == 3
    with pytest.raises(ValueError):
        ShardFeed(client, "d", 0, prefetch_shards=0)


def test_a_feed_hands_on_what_its_thread_met(client: ShardClient) -> None:
    feed = ShardFeed(client, "unknown", 0)
    feed._thread.join(PATIENCE_S)
    with pytest.raises(RefusedError, match="dataset 'unknown' is unknown"):
        feed.poll()
    feed.close()


def test_a_lease_that_was_not_renewed_in_time_stays_lost() -> None:
    """Also where an answer comes late: by now the shard may be another worker's."""
    lease = Lease(Grant(7, "d", 0, 3, 12, 4, 0, 0), usable_until_s=time.monotonic() - 60.0)
    message = catch_message(LeaseLostError, lease.advance, 1)
    late = re.fullmatch(
        r"the lease of shard 3 of dataset 'd' is lost: not renewed in time \(\d+\.\d s late\), the "
        r"process or the link stood still\. Only a live lease may be trained: in a synchronous job "
        r"stop this process and restart from the checkpoint\.",
        message,
    )
    assert late
    lease.usable_until_s = time.monotonic() + 60.0
    assert (catch_message(LeaseLostError, lease.check), lease.units_done) == (message, 0)


def test_readings_come_with_the_next_heartbeat_and_the_last_ones_with_the_end(
    server: ShardServer, address: str
) -> None:
    def curves() -> Any:
        view = LedgerView(lambda ledger, now_s: ledger.state.readings.curves())
        found = server.edge.ask(view).get("loss", [])
        assert all(wall_s > 1e9 for *_, wall_s in found)
        return [point[:2] for point in found]

    with ShardClient(address, "a") as client:
        client.report_metrics(1, {"loss": 0.5})
        client.hurry()
        wait_until(lambda: curves() == [(1, 0.5)])
        client.report_metrics(2, {"loss": 0.25})
    assert curves() == [(1, 0.5), (2, 0.25)]


def test_a_reading_of_many_scores_takes_no_lease_away(
    server: ShardServer, address: str, client: ShardClient
) -> None:
    """More values than a reading of the service holds: a refused heartbeat renews nothing."""
    scores = {f"valid/auc-{number}": number / 1000 for number in range(150)}
    client.report_metrics(7, scores)
    client.report_metrics(8, {"x" * 129: 0.5, "loss": 0.25})
    client._heartbeat.beat()
    curves: Any = server.edge.ask(LedgerView(lambda ledger, now_s: ledger.state.readings.curves()))
    found = {name: [point[:2] for point in points] for name, points in curves.items()}
    expected = {name: [(7, value)] for name, value in scores.items()}
    assert found == {**expected, "loss": [(8, 0.25)]}


def test_a_lease_that_was_lost_here_is_not_renewed_for_ever(client: ShardClient) -> None:
    """A loop that goes on without it would wait for END until somebody ends the process."""
    late, used = client.lease("d", 0, 2)
    late.usable_until_s = time.monotonic() - 1.0  # the process stood still
    with pytest.raises(LeaseLostError):
        late.check()
    sent: list[set[int]] = []
    call = client._session.call

    def noted(rpc: str, **fields: Any) -> Any:
        sent.append(fields["tokens"])
        return call(rpc, **fields)

    client._session.call = noted  # type: ignore[method-assign]
    client._heartbeat.beat()
    client._session.call = call  # type: ignore[method-assign]
    assert sent
    assert all(tokens == {used.token} for tokens in sent)


def test_a_heartbeat_amid_a_rollback_fences_nobody(client: ShardClient) -> None:
    """It left in the generation that the roll-back ends."""
    connection, restoring = client._session.connection, Future[int]()
    attempt = connection._attempt

    def overtaken(rpc: str, request: Any) -> Any:
        if rpc == "Heartbeat":
            threading.Thread(target=lambda: restoring.set_result(client.restore(None))).start()
            with suppress(TimeoutError):
                restoring.result(0.5)  # where nothing holds it back
        return attempt(rpc, request)

    connection._attempt = overtaken  # type: ignore[method-assign]
    client._heartbeat.beat()
    connection._attempt = attempt  # type: ignore[method-assign]
    assert restoring.result(PATIENCE_S) == client.run_generation
    assert isinstance(client.lease("d", 0), list)


def test_nobody_waits_for_a_feed_that_was_closed(client: ShardClient) -> None:
    feed = ShardFeed(client, "d", 0, prefetch_shards=1)
    assert feed.next_lease() is not None
    wait_until(lambda: feed._ready)
    leasing, go_on = threading.Event(), threading.Event()
    lease = client.lease

    def held_up(*arguments: Any) -> Any:
        leasing.set()
        go_on.wait(PATIENCE_S)
        return []

    client.lease = held_up  # type: ignore[method-assign]
    assert feed.next_lease() is not None
    waiting: Future[Any] = Future()
    threading.Thread(target=lambda: waiting.set_result(feed.next_lease())).start()
    assert leasing.wait(PATIENCE_S)
    closing = threading.Thread(target=feed.close)
    closing.start()
    wait_until(feed._closed.is_set)
    go_on.set()
    assert waiting.result(PATIENCE_S) is None
    closing.join()
    client.lease = lease  # type: ignore[method-assign]


def test_what_was_noted_is_reported_as_the_client_ends(address: str, client: ShardClient) -> None:
    """It is in the model: nobody shall train it again."""
    with ShardClient(address, "b") as other:
        (lease,) = other.lease("d", 0)
        lease.advance(1)
    again = {lease.shard_index: lease.units_done for lease in client.lease("d", 0, 3)}  # type: ignore[union-attr]
    assert again[lease.shard_index] == 1


def test_beside_a_lost_lease_the_others_go_back(address: str, client: ShardClient) -> None:
    with ShardClient(address, "b") as other:
        lost, kept = other.lease("d", 0, 2)
        lost.advance(1)
        kept.advance(1)
        other._session.apply_renewal(time.monotonic(), {lost.token}, {lost.token})
    # The lost one runs out at the service; the other goes on where it stood.
    found = client.lease("d", 0, 3)
    assert [lease.units_done for lease in found if lease.shard_index == kept.shard_index] == [1]
    assert len(found) == 2


def test_a_failure_counts_though_another_lease_is_lost(address: str, client: ShardClient) -> None:
    lost, poison = client.lease("d", 0, 2)
    lost.advance(1)
    poison.advance(1)
    client._session.apply_renewal(time.monotonic(), {lost.token}, {lost.token})
    with pytest.raises(LeaseLostError):
        client.fail(poison, "READ", "no such file")
    assert client.held == []
    with ShardClient(address, "c") as third:
        again = [one for one in third.lease("d", 0, 3) if one.shard_index == poison.shard_index]
    assert [one.units_done for one in again] == [1]


def test_a_client_that_is_left_waits_for_no_service_to_register_with(
    client: ShardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client._session.closed.set()
    budgets: list[float | None] = []
    call = client._session.connection.call

    def noted(*arguments: Any, **named: Any) -> Any:
        budgets.append(named["budget_s"])
        return call(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(client._session.connection, "call", noted)
        client._session.register()
    client._session.closed.clear()
    assert budgets == [CLOSING_BUDGET_S]
