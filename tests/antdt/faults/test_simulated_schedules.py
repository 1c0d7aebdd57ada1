"""Method: deterministic simulation with seeded schedules, and every named crash point. 200
schedules here; `make antdt-faults` runs the 10,000 of the nightly goal. A failure names its seed:
Simulation(seed).run() repeats it exactly."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.antdt.faults.simulation import CRASH_POINTS, Simulation
from tests.antdt.faults.speculation import SpeculativeJob

NUM_SCHEDULES = int(os.environ.get("ANTDT_SCHEDULES", "200"))
NUM_BLOCKS = 8


@contextmanager
def named(call: str) -> Iterator[None]:
    """A violation says with which call it is seen again."""
    try:
        yield
    except AssertionError as violation:
        raise AssertionError(f"{call}: {violation}") from violation


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_every_schedule_trains_each_unit_exactly_once(block: int) -> None:
    crashes: Counter[str] = Counter()
    for seed in range(block, NUM_SCHEDULES, NUM_BLOCKS):
        simulation = Simulation(seed)
        with named(f"Simulation({seed}).run()"):
            simulation.run()
        crashes += simulation.crashes
    if NUM_SCHEDULES >= 1000:
        assert set(crashes) >= set(CRASH_POINTS) - {"after_claim", "after_snapshot"}


@pytest.mark.timeout(1200)
def test_every_schedule_puts_each_speculative_result_into_effect_exactly_once() -> None:
    num_backups = 0
    for seed in range(NUM_SCHEDULES // 2):
        job = SpeculativeJob(seed)
        with named(f"SpeculativeJob({seed}).run()"):
            job.run()
        num_backups += job.num_backups
    assert num_backups > NUM_SCHEDULES // 2  # or nothing was tried


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_dying_again_and_again_at_one_point_loses_nothing(point: str) -> None:
    crashes: Counter[str] = Counter()
    for seed in range(40):
        simulation = Simulation(100_000 + seed, only_point=point)
        simulation.run()
        crashes += simulation.crashes
        if crashes[point] >= NUM_SCHEDULES // 10:
            break
    assert set(crashes) == {point}
    assert crashes[point] >= 5


def test_the_same_seed_gives_the_same_history() -> None:
    heads = []
    for _ in range(2):
        simulation = Simulation(17)
        simulation.run()
        heads.append(simulation.committer.ledger.head)
    assert heads[0] == heads[1]
