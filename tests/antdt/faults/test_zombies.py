"""Method: SIGSTOP zombies. A worker stands still past its ttl, then wakes and reports."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gmeta.access.errors import AntdtError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.lease import SAFE_FRACTION, EndOfEpoch, WaitFor
from gmeta.antdt.errors import LeaseLostError
from gmeta.antdt.ledger.ledger import DEFAULT_LEASE_TTL_S
from gmeta.antdt.model import DatasetSpec
from tests.antdt.faults.service_process import CONTEXT, running
from tests.support.waiting import PATIENCE_S


def hold_a_shard(address: str, out: Any, go_on: Any) -> None:
    """Leases, says so, and reports once it is told to; puts what became of the report."""
    with ShardClient(address, "zombie") as client:
        (lease,) = client.lease("d", 0)
        out.put(("leased", lease.shard_index))
        go_on.wait()
        try:
            # Past the client's own check: the service must refuse.
            lease.units_done = lease.num_units
            client.flush()
            out.put(("reported", ""))
        except AntdtError as error:
            out.put((type(error).__name__, str(error)))


def test_a_stopped_workers_late_report_is_fenced(tmp_path: Path) -> None:
    out, go_on = CONTEXT.Queue(), CONTEXT.Event()
    with running(tmp_path / "s.db") as service, ShardClient(service.address, "b") as heir:
        heir.register_dataset(DatasetSpec("d", 4, 4))
        zombie = CONTEXT.Process(
            target=hold_a_shard, args=(service.address, out, go_on), daemon=True
        )
        zombie.start()
        assert out.get(timeout=PATIENCE_S) == ("leased", 0)
        os.kill(zombie.pid, signal.SIGSTOP)
        service.let_time_pass(DEFAULT_LEASE_TTL_S + 1)
        (lease,) = heir.lease("d", 0)
        os.kill(zombie.pid, signal.SIGCONT)
        go_on.set()
        kind, message = out.get(timeout=PATIENCE_S)
        assert kind == "LeaseLostError"
        assert message.startswith("the lease of shard 0 of dataset 'd' is lost: ")
        lease.advance(4)
        heir.flush()
        zombie.join(PATIENCE_S)
        assert isinstance(heir.lease("d", 0), EndOfEpoch)


def test_a_client_stops_using_a_lease_before_the_service_gives_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running(tmp_path / "s.db") as service,
        ShardClient(service.address, "a") as client,
        ShardClient(service.address, "b") as other,
    ):
        client.register_dataset(DatasetSpec("d", 4, 4))
        (lease,) = client.lease("d", 0)
        service.signal(signal.SIGSTOP)  # no heartbeat is answered
        later = SimpleNamespace(
            monotonic=lambda: time.monotonic() + SAFE_FRACTION * DEFAULT_LEASE_TTL_S
        )
        monkeypatch.setattr("gmeta.antdt.client.lease.time", later)
        with pytest.raises(LeaseLostError) as lost:
            lease.advance(1)
        service.signal(signal.SIGCONT)
        assert str(lost.value).startswith(
            "the lease of shard 0 of dataset 'd' is lost: not renewed in time ("
        )
        service.let_time_pass(SAFE_FRACTION * DEFAULT_LEASE_TTL_S)
        assert isinstance(other.lease("d", 0), WaitFor)
