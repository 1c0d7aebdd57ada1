"""Method: steps of the wall clock. Leases live by the server's monotonic clock alone."""

from pathlib import Path

import pytest

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.ledger.ledger import DEFAULT_LEASE_TTL_S
from gmeta.antdt.model import DatasetSpec
from tests.antdt.faults.service_process import running


@pytest.mark.parametrize("step_s", [86_400.0, -86_400.0])
def test_a_step_of_the_wall_clock_changes_no_lease(tmp_path: Path, step_s: float) -> None:
    with (
        running(tmp_path / "s.db") as service,
        ShardClient(service.address, "a") as holder,
        ShardClient(service.address, "b") as heir,
    ):
        holder.register_dataset(DatasetSpec("d", 4, 4))
        (lease,) = holder.lease("d", 0)
        service.step_wall_clock(step_s)
        lease.advance(1)
        holder.flush()
        # Heartbeats come every third of it: only a jump lets the lease expire beside them.
        service.let_time_pass(DEFAULT_LEASE_TTL_S + 1)
        (again,) = heir.lease("d", 0)
        assert (again.shard_index, again.units_done) == (0, 1)
