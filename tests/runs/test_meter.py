"""What is read of the steps since the last reading."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gmeta.runs import step_meter as run_meter
from gmeta.runs.step_meter import StepMeter


def of_rank(rank: int, world_size: int = 1) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass when a test says so."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(run_meter, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def both_alike(values: list[float], ranks: Any) -> list[float]:
    return [ranks.world_size * value for value in values]


def test_a_reading_is_the_mean_of_the_steps_since_the_last(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(run_meter, "sum_over_ranks", both_alike)
    meter = StepMeter(of_rank(0, world_size=2))
    for loss, num_rows in ((1.0, 30), (2.0, 50)):
        meter.add(torch.tensor(loss), num_rows)
    clock.s += 4.0
    assert meter.steps == 2
    assert meter.read(wait_s=1.0) == {"loss": 1.5, "samples_per_s": 20.0, "data_wait_share": 0.25}
    meter.add(torch.tensor(5.0), 10)
    clock.s += 1.0
    # The wait is a running total: what the first reading had is not counted again.
    assert meter.read(wait_s=1.5) == {"loss": 5.0, "samples_per_s": 10.0, "data_wait_share": 0.5}
    assert meter.steps == 0


def test_a_step_that_shows_no_loss_is_not_one_of_loss_0(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(run_meter, "sum_over_ranks", both_alike)
    meter = StepMeter(of_rank(0))
    # Three quarters of the first step's terms have a value, none of the second's.
    for loss, terms_per_shown in ((0.75, 4 / 3), (0.0, 0.0), (2.0, 1.0)):
        meter.add(torch.tensor(loss), 10, terms_per_shown)
    clock.s += 1.0
    assert meter.steps == 3
    assert meter.read(wait_s=0.0) == {"loss": 1.5, "samples_per_s": 30.0, "data_wait_share": 0.0}
    meter.add(torch.tensor(0.0), 10, 0.0)
    clock.s += 1.0
    assert meter.read(wait_s=0.0) == {"loss": None, "samples_per_s": 10.0, "data_wait_share": 0.0}


def test_what_is_done_between_steps_makes_them_no_slower(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(run_meter, "sum_over_ranks", both_alike)
    meter = StepMeter(of_rank(0))
    with meter.exclude_time():  # before the first step too
        clock.s += 50.0
    for _ in range(2):
        clock.s += 1.0
        meter.add(torch.tensor(1.0), 10)
        with meter.exclude_time():
            clock.s += 100.0
    assert meter.read(wait_s=0.5) == {"loss": 1.0, "samples_per_s": 10.0, "data_wait_share": 0.25}


def test_a_loss_that_is_read_keeps_no_graph() -> None:
    meter = StepMeter(of_rank(0))
    weight = torch.ones((), requires_grad=True)
    meter.add(2 * weight, 1)
    assert not meter._loss.requires_grad
