"""Method: steps of the wall clock. Leases live by the server's monotonic clock alone."""

import time
from pathlib import Path

import pytest

from gmeta.antdt.client import ShardClient
from gmeta.antdt.model import DatasetSpec
from tests.antdt.faults.service_process import running


@pytest.mark.parametrize("step_s", [86_400.0, -86_400.0])
def test_a_step_of_the_wall_clock_expires_no_lease_and_keeps_none_alive(
    tmp_path: Path, step_s: float
) -> None:
    with (
        running(tmp_path / "s.db", lease_ttl_s=2.0, wall_clock_step_s=step_s) as service,
        ShardClient(service.address, "a") as holder,
        ShardClient(service.address, "b") as heir,
    ):
        holder.register_dataset(DatasetSpec("d", 4, 4))
        (lease,) = holder.lease("d", 0)
        time.sleep(1.5)  # the step is over
        lease.advance(1)
        holder.flush()
        holder._closed.set()  # no further heartbeat: now it must expire, by the monotonic clock
        holder._heart.join()
        time.sleep(2.3)
        (again,) = heir.lease("d", 0)
        assert (again.shard_index, again.units_done) == (0, 1)
