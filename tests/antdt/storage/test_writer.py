"""Which answers wait for the disk, and what happens when it fails."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from gmeta.access.errors import RefusedError
from gmeta.access.log import JsonFormatter
from gmeta.antdt.errors import StoreFailedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.ledger import Ledger
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.storage import ledger_writer as writer_module
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.ledger_writer import LedgerWriter
from gmeta.antdt.storage.request import AnsweredRequest, LedgerView
from gmeta.antdt.storage.store import MemoryStore
from tests.support.waiting import PATIENCE_S, wait_until


def deliver(answered: list[AnsweredRequest]) -> None:
    for future, answer in answered:
        future.set_result(answer)


class Harness:
    """A writer whose disk can be held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryStore()
        self.committer = Committer(self.store, time.monotonic)
        self.disk_free = threading.Event()
        self.disk_free.set()
        self.fail_sync = False
        self.ended = threading.Event()
        monkeypatch.setattr(self.store, "sync", self.sync)
        self.writer = LedgerWriter(self.committer, deliver, lambda stats: None, self.ended.set)
        self.writer.start()

    def sync(self) -> None:
        self.disk_free.wait()
        if self.fail_sync:
            raise StoreFailedError("the disk failed")

    def send(self, command: cmd.Command | LedgerView) -> Future[Any]:
        future: Future[Any] = Future()
        self.writer.submit(command, future)
        return future

    def ask(self, command: cmd.Command) -> Any:
        return self.send(command).result(PATIENCE_S)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    made = Harness(monkeypatch)
    made.ask(cmd.RegisterDataset(DatasetSpec("d", 2, 1)))
    for name in ("a", "b"):
        made.ask(cmd.Register(name, "p", None))
    return made


def caller(name: str) -> Caller:
    return Caller(name, "p", 1, 1)


def test_grants_leave_at_once_and_completions_wait_for_the_disk(harness: Harness) -> None:
    first = harness.ask(cmd.LeaseShards(caller("a"), 1, "d", 0, 1))
    harness.disk_free.clear()
    completing = harness.send(cmd.Complete(caller("a"), 2, (first.grants[0].token,)))
    assert isinstance(harness.ask(cmd.LeaseShards(caller("b"), 1, "d", 0, 1)), cmd.GrantReply)
    with pytest.raises(TimeoutError):
        completing.result(0.2)
    harness.disk_free.set()
    completing.result(PATIENCE_S)
    harness.writer.stop()


def test_end_is_not_told_before_the_last_completion_is_on_the_disk(harness: Harness) -> None:
    """After a power cut a worker would know END while a shard is not done."""
    grants = harness.ask(cmd.LeaseShards(caller("a"), 1, "d", 0, 2)).grants
    harness.disk_free.clear()
    harness.send(cmd.Complete(caller("a"), 2, tuple(grant.token for grant in grants)))
    asking = harness.send(cmd.LeaseShards(caller("b"), 1, "d", 0, 1))
    with pytest.raises(TimeoutError):
        asking.result(0.3)
    harness.disk_free.set()
    assert asking.result(PATIENCE_S) == cmd.End(1)
    harness.writer.stop()


def test_a_defect_of_the_writer_leaves_no_call_without_an_answer(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the service would wait for each of them."""

    def broken(requests: object) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        patch.setattr(harness.committer, "append", broken)
        told = harness.send(LedgerView(lambda ledger, now_s: "seen")).result(PATIENCE_S)
        harness.writer.stop()
    assert (told.code, told.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
    assert harness.ended.is_set()


def test_a_failed_fsync_ends_the_service_and_acknowledges_nothing(harness: Harness) -> None:
    """What came behind the failed call is refused at once: the service's end waits for it."""
    first = harness.ask(cmd.LeaseShards(caller("a"), 1, "d", 0, 1))
    num_batches = len(harness.store.disk.log)
    harness.disk_free.clear()
    harness.fail_sync = True
    completing = harness.send(cmd.Complete(caller("a"), 2, (first.grants[0].token,)))
    wait_until(lambda: len(harness.store.disk.log) == num_batches + 1)
    behind = [harness.send(LedgerView(lambda ledger, now_s: "seen")) for _ in range(2)]
    wait_until(lambda: not harness.writer._queue)
    harness.disk_free.set()
    assert harness.ended.wait(PATIENCE_S)
    for future in (completing, *behind):
        told = future.result(PATIENCE_S)
        assert (told.code, told.reason) == ("UNAVAILABLE", "STORE_FAILED")
        assert str(told) == "the disk failed"
    harness.writer.stop()
    with pytest.raises(RefusedError) as refused:
        harness.send(cmd.Tick())
    assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
    assert str(refused.value) == "the service is shutting down; retry: its successor answers."


def test_stop_answers_what_is_queued(harness: Harness) -> None:
    futures = [harness.send(cmd.LeaseShards(caller("a"), 1, "d", 0, 1)) for _ in range(20)]
    harness.writer.stop()
    assert all(future.done() for future in futures)


def assert_fails_alone(harness: Harness, request: cmd.Command | LedgerView) -> None:
    """Between two leases of one group, which are granted."""
    harness.disk_free.clear()
    first = harness.send(cmd.LeaseShards(caller("a"), 1, "d", 0, 1))
    asking = harness.send(request)
    last = harness.send(cmd.LeaseShards(caller("b"), 1, "d", 0, 1))
    harness.disk_free.set()
    refused = asking.result(PATIENCE_S)
    assert (refused.code, refused.reason) == ("INTERNAL", "INTERNAL")
    assert str(refused) == (
        "the service could not answer: ZeroDivisionError: a defect. That is a defect of the "
        "service, which goes on; report it with the traceback from its log."
    )
    assert all(isinstance(each.result(PATIENCE_S), cmd.GrantReply) for each in (first, last))


def test_a_view_that_raises_fails_its_own_call_and_nothing_else(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(ledger: Ledger, now_s: float) -> None:
        raise ZeroDivisionError("a defect")

    assert_fails_alone(harness, LedgerView(broken))
    (logged,) = [record for record in caplog.records if record.message == "view_failed"]
    assert "test_writer.py" in JsonFormatter().format(logged)
    assert harness.ask(LedgerView(lambda ledger, now_s: len(ledger.state.leases))) == 2
    assert not harness.ended.is_set()
    harness.writer.stop()


def test_a_command_that_raises_fails_its_own_call_and_leaves_nothing_behind(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of it was applied in memory: nothing of that half may be answered or stored."""
    evolve = LedgerState.evolve

    def broken(state: LedgerState, event: Any) -> None:
        evolve(state, event)
        if isinstance(event, ev.DrainSet):
            raise ZeroDivisionError("a defect")

    monkeypatch.setattr(LedgerState, "evolve", broken)
    assert_fails_alone(harness, cmd.Drain("r", "", undo=False))
    (logged,) = [record for record in caplog.records if record.message == "command_failed"]
    assert "test_writer.py" in JsonFormatter().format(logged)
    assert harness.ask(LedgerView(lambda ledger, now_s: ledger.state.draining)) is False
    harness.writer.stop()
    successor = Committer(harness.store, time.monotonic).ledger.state
    assert (successor.draining, len(successor.leases)) == (False, 2)


def test_callers_beyond_the_queue_return(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer itself is held up: what is queued behind it stays queued."""
    entered, go_on = threading.Event(), threading.Event()

    def held_up(ledger: Ledger, now_s: float) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(writer_module, "MAX_QUEUED", 2)
    first = harness.send(LedgerView(held_up))
    assert entered.wait(PATIENCE_S)
    queued = [harness.send(LedgerView(lambda ledger, now_s: "seen")) for _ in range(2)]
    with pytest.raises(RefusedError) as refused:
        harness.send(cmd.Tick())
    assert (refused.value.code, refused.value.reason) == ("RESOURCE_EXHAUSTED", "BUSY")
    assert str(refused.value) == "2 calls are waiting; no more are taken. Retry after a pause."
    go_on.set()
    first.result(PATIENCE_S)
    assert [future.result(PATIENCE_S) for future in queued] == ["seen", "seen"]
    harness.writer.stop()
