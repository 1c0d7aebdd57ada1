"""How long a call waits for a service that does not take it: with no service, and no clock."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gmeta.antdt.client import connection as tested
from gmeta.antdt.client.call_stream import CallError
from gmeta.antdt.client.connection import ConnectionConfig, ServiceConnection
from gmeta.antdt.errors import ServiceUnavailableError

FULL = "the disk under /shards.db is full"


class Waiting:
    """A connection whose service answers STORE_FULL for ever, and whose clock only pauses move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.attempts_s: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(tested, "time", clock)
        self.connection = ServiceConnection(ConnectionConfig("127.0.0.1:7070"))
        monkeypatch.setattr(self.connection, "_attempt", self._refuse)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _refuse(self, rpc: str, request: Any) -> Any:
        self.attempts_s.append(self.now_s)
        raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL", FULL, False)

    def outage(self, budget_s: float | None = None) -> str:
        with pytest.raises(ServiceUnavailableError) as caught:
            self.connection.call("Lease", lambda: None, budget_s=budget_s)
        return str(caught.value)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(monkeypatch)


def test_a_full_store_is_waited_for_until_the_budget_is_spent(waiting: Waiting) -> None:
    assert waiting.outage().endswith(
        "; allowed is 300 s. Start it again on the same store, or "
        "look into its log; the data has NOT ended."
    )
    assert 290 < waiting.now_s <= 300


def test_who_waits_for_a_full_store_hears_of_the_stop_at_once(waiting: Waiting) -> None:
    waiting.connection.is_stopping = lambda: waiting.now_s >= 60
    assert waiting.outage() == (
        f"the shard service at 127.0.0.1:7070 did not answer Lease for 60 s (RESOURCE_EXHAUSTED: "
        f"{FULL}), and this process was asked to stop, which waits no longer. Start it again once "
        "the service answers: what is in no checkpoint is handed out again."
    )
    assert waiting.now_s < 60.5
    # Once more: it may have had space again.
    assert len([at_s for at_s in waiting.attempts_s if at_s >= 60]) == 1


def test_a_call_of_a_stopping_process_waits_for_the_services_restart(waiting: Waiting) -> None:
    """The last checkpoint is worth seconds; and they are no seconds of calls without end."""
    waiting.connection.is_stopping = lambda: True
    waiting.outage()
    assert 2 < waiting.now_s <= 5
    assert len(waiting.attempts_s) < 20
    waiting.now_s = 0
    waiting.outage(budget_s=1.0)
    assert waiting.now_s <= 1


def test_pings_are_no_more_than_a_proxy_permits_by_default() -> None:
    options = dict(tested._OPTIONS)
    assert options["grpc.keepalive_time_ms"] > 5 * 60 * 1000
    assert "grpc.keepalive_permit_without_calls" not in options
