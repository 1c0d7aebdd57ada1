"""Calls that come twice, stores that fail once, and what a long run may not pile up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import StoreFailedError, StoreFullError, StoreTakenError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import state as ledger_state
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.metric_readings import MetricReading
from gmeta.antdt.model import Outcome
from gmeta.antdt.storage.store_records import RecordBatch
from tests.antdt.driver import Process, Service, counts


@pytest.fixture
def service() -> Service:
    service = Service(snapshot_every_events=1000)
    service.register_dataset(shuffle=False, max_attempts=1)
    return service


@contextmanager
def refusing(service: Service, error: Exception) -> Iterator[None]:
    """Inside, the service's store takes nothing."""

    def refuse(batch: RecordBatch) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service.store, "append", refuse)
        yield


def numbered(worker: Process, kind: str, token: int) -> Any:
    seq = worker.seq + 1
    if kind == "fail":
        return cmd.Fail(worker.caller, seq, token, "bad", "row 3")
    return {"complete": cmd.Complete, "release": cmd.Release}[kind](worker.caller, seq, (token,))


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("kind", ["complete", "release", "fail"])
def test_a_call_that_comes_twice_is_applied_once_and_answered_alike(
    service: Service, kind: str, restarts: bool
) -> None:
    worker = service.worker("a")
    command = numbered(worker, kind, worker.grant().token)
    answer = service.call(command)
    after = counts(service)
    if restarts:  # the answer was lost with the service that gave it
        service.restart()
        worker.register()
        command = command._replace(caller=worker.caller)
    assert service.call(command) == answer
    assert counts(service) == after
    assert answer.outcomes == (Outcome.ACCEPTED,)


def test_a_failure_of_somebody_elses_shard_uses_no_number(service: Service) -> None:
    a, b = service.worker("a"), service.worker("b")
    token = a.grant().token
    reply = service.call(cmd.Fail(b.caller, 1, token, "bad", "row 3"))
    assert reply == cmd.Outcomes(0, (Outcome.FENCED,))
    # So the next call of b carries the same one.
    assert service.call(cmd.LeaseShards(b.caller, 1, "d", 0, 1)).last_seq == 1
    assert counts(service)["DOING"] == 2


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StoreFullError("the disk is full"), "RESOURCE_EXHAUSTED", "STORE_FULL"),
        (StoreFailedError("the disk failed"), "UNAVAILABLE", "STORE_FAILED"),
    ],
)
def test_what_the_store_did_not_take_did_not_happen_and_the_next_call_goes_on(
    service: Service, error: Exception, code: str, reason: str
) -> None:
    worker = service.worker("a")
    waiting = service.worker("b")
    held = worker.lease(4).grants
    last = waiting.lease()
    assert isinstance(waiting.lease(), cmd.Wait)  # leaves no event, and its number is known
    with refusing(service, error):
        with pytest.raises(RefusedError) as refused:
            worker.complete(held[0].token)
        assert (refused.value.code, refused.value.reason) == (code, reason)
        assert str(refused.value) == str(error)
    assert worker.complete(held[0].token) == (Outcome.ACCEPTED,)
    assert waiting.complete(last.grants[0].token) == (Outcome.ACCEPTED,)
    for _ in range(2):  # and once more from what is stored
        assert (counts(service)["DOING"], counts(service)["DONE"]) == (3, 2)
        service.restart()


def test_what_the_store_did_not_take_is_in_no_snapshot_either(service: Service) -> None:
    """A service that is stopped right behind the call that it refused stores one."""
    worker = service.worker("a")
    token = worker.grant().token
    with refusing(service, StoreFullError("the disk is full")), pytest.raises(RefusedError):
        worker.complete(token)
    service.committer.try_snapshot()
    service.restart()
    assert (counts(service)["DOING"], counts(service)["DONE"]) == (1, 0)


def test_what_no_event_holds_outlives_a_store_that_failed_once(service: Service) -> None:
    """Since when the service runs says whether a worker is silent; the live page has the curves."""
    worker, began_s = service.worker("a"), service.committer.ledger.started_s
    service.call(cmd.Heartbeat(worker.caller, (), (), (MetricReading(1, {"loss": 0.5}),)))
    with refusing(service, StoreFullError("the disk is full")), pytest.raises(RefusedError):
        worker.lease()
    worker.lease()
    ledger = service.committer.ledger
    assert (ledger.started_s, ledger.state.readings.curves()) == (
        began_s,
        {"loss": [(1, 0.5, None)]},
    )


def test_a_store_that_another_service_took_answers_nothing_more(service: Service) -> None:
    num_written = len(service.disk.log)
    with (
        refusing(service, StoreTakenError("another service took the store")),
        pytest.raises(RefusedError, match="another service took the store"),
    ):
        service.worker("a")
    # Also once it could be written again: what the other one wrote is not known here.
    with pytest.raises(RefusedError) as refused:
        service.worker("a")
    assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "STORE_TAKEN")
    assert len(service.disk.log) == num_written


def run_for_long(service: Service) -> LedgerState:
    """Three of everything that is remembered for retries."""
    worker = service.worker("a")
    for number in range(3):
        worker.complete(worker.grant().token)
        worker.prepare(f"c{number}", number)
        service.call(cmd.PostAction("a", f"x{number}", 5, 0, {}))
        service.call(cmd.AckAction(worker.caller, f"x{number}", 1, ""))
        service.call(cmd.Drain(f"o{number}", "a", undo=bool(number % 2)))
        service.call(cmd.Drain(f"p{number}", "a", undo=True))
    return service.state  # type: ignore[no-any-return]


def test_what_is_remembered_for_retries_is_the_newest_and_no_more(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_CLOSED_TOKENS", "MAX_CHECKPOINTS", "MAX_ACTIONS", "MAX_REQUESTS"):
        monkeypatch.setattr(ledger_state, name, 2)
    state = run_for_long(service)
    assert list(state.checkpoints) == ["c1", "c2"]
    assert list(state.acked) == ["x1", "x2"]
    assert list(state.requests) == ["o2", "p2"]
    assert len(state.closed) == 2
    # The same after a restart: replayed, not kept.
    service.restart()
    again: LedgerState = service.state
    assert list(again.checkpoints) == list(state.checkpoints)
    assert again.acked == state.acked
    assert again.requests == state.requests
    assert again.closed == state.closed
