"""What steps tell of the cost of a task and of a row, and who hears of it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.config.train_config import DataConfig, RunConfig, TrainConfig, config_from_dict
from gmeta.data.reader import open_reader, task_cost_of
from gmeta.distributed.ranks import Ranks
from gmeta.errors import ConfigError
from gmeta.feeds.cost_meter import MIN_STEPS, WARM_UP_STEPS, CostMeter, fit_costs
from gmeta.feeds.local_time import LocalClock
from gmeta.runs.resolve import resolve
from gmeta.runs.run_folder import COST_FILE, list_checkpoints
from gmeta.training import train
from gmeta_models import ModelConfig
from metaio import open_dataset
from tests.distributed.harness import on_ranks
from tests.support.refusals import catch_message


def sums_of(steps: Any) -> Any:
    return sum(np.outer(step, step) for step in steps)


def steps_with(per_step: float, per_task: float, per_row: float, noise: float = 0.0) -> Any:
    rng = np.random.default_rng(3)
    tasks, rows = rng.integers(5, 60, 400), rng.integers(200, 3_000, 400)
    ms = per_step + per_task * tasks + per_row * rows + noise * rng.standard_normal(400)
    return np.stack([np.ones(400), tasks, rows, ms], axis=1)


def test_the_costs_of_steps_are_found() -> None:
    costs = {"per_step_ms": 3.0, "per_task_ms": 0.2, "per_row_ms": 0.01}
    assert fit_costs(sums_of(steps_with(*costs.values()))) == pytest.approx(costs)
    noisy = fit_costs(sums_of(steps_with(*costs.values(), noise=2.0)))
    assert noisy == pytest.approx(costs, rel=0.2)


def test_no_cost_is_below_0() -> None:
    found = fit_costs(sums_of(steps_with(3.0, -0.05, 0.01)))
    assert found is not None
    assert found["per_task_ms"] == 0.0
    assert found["per_row_ms"] == pytest.approx(0.01, rel=0.1)


def test_tasks_that_are_all_alike_or_few_steps_tell_nothing_of_a_task() -> None:
    steps = steps_with(3.0, 0.2, 0.01)
    assert fit_costs(sums_of(steps[: MIN_STEPS - 1])) is None
    steps[:, 1] = 16  # as many in every step: that is a cost of the step
    found = fit_costs(sums_of(steps))
    assert found is not None
    assert found["per_task_ms"] == 0.0
    # Rows and tasks grow together: what a step of more tasks takes longer is called the rows'.
    steps[:, 2] = 30 * steps[:, 1]
    found = fit_costs(sums_of(steps))
    assert found is None or found["per_task_ms"] == 0.0


def test_each_time_belongs_to_its_step_also_if_it_comes_later_or_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gmeta.feeds.cost_meter.gather_values", lambda value, ranks: [value])
    ranks: Any = None
    local: Any = SimpleNamespace()
    meter = CostMeter(local, ranks)
    assert local.clock is meter.clock
    coming: list[tuple[int, float]] = []
    clock: Any = SimpleNamespace(num_started=0, take=lambda: [*coming])
    meter.clock = clock
    late, spent_s = [], 0.0
    for number, (_, tasks, rows, ms) in enumerate(steps_with(3.0, 0.2, 0.01), start=1):
        clock.num_started, coming = number, []
        if number % 7 == 0:
            late = [(number, ms / 1000)]  # a GPU ends it during the next step
        elif number % 5:  # else without rows of this rank: never timed
            coming = [*late, (number, ms / 1000)]
            late = []
        spent_s += meter.finish_step(int(tasks), int(rows))
    assert spent_s > 0
    costs = json.loads(meter.checkpoint_files()[COST_FILE])
    assert costs == pytest.approx({"per_step_ms": 3.0, "per_task_ms": 0.2, "per_row_ms": 0.01})


def test_the_first_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gmeta.feeds.cost_meter.gather_values", lambda value, ranks: [value])
    local: Any = SimpleNamespace()
    ranks: Any = None
    meter = CostMeter(local, ranks)
    clock: Any = SimpleNamespace(num_started=0)
    meter.clock = clock
    for number, (_, tasks, rows, ms) in enumerate(steps_with(3.0, 0.2, 0.01), start=1):
        clock.num_started = number
        seconds = ms / 1000 if number > WARM_UP_STEPS else 9.0
        clock.take = lambda of=(number, seconds): [of]
        meter.finish_step(int(tasks), int(rows))
    costs = json.loads(meter.checkpoint_files()[COST_FILE])
    assert costs == pytest.approx({"per_step_ms": 3.0, "per_task_ms": 0.2, "per_row_ms": 0.01})


def test_the_clock_counts_steps_and_takes_each_once() -> None:
    clock = LocalClock()
    for _ in range(2):
        rows = torch.ones(3, 2, requires_grad=True)
        clock.start(rows)
        rows.sum().backward()
    clock.start(torch.ones(3, 2))  # of a prediction
    assert clock.num_started == 2
    numbers, seconds = zip(*clock.take(), strict=True)
    assert numbers == (1, 2)
    assert min(seconds) > 0
    assert clock.take() == []


def run_on_rank(ranks: Ranks, config: TrainConfig) -> None:
    train(config, ranks)


@pytest.mark.distributed
def test_a_fitted_run_cuts_as_the_steps_before_its_checkpoint_took(
    click_logs: Path, tmp_path: Path
) -> None:
    def config(name: str, **run: Any) -> TrainConfig:
        data = DataConfig(path=str(click_logs), tasks_per_step=16, task_cost="fitted")
        model = ModelConfig(name="melu", embedding_dim=4, hidden=(4,))
        return TrainConfig(
            data=data, model=model, run=RunConfig(dir=str(tmp_path / name), epochs=6, **run)
        )

    assert resolve(config("one")).data.task_cost == DataConfig.task_cost
    on_ranks(2, run_on_rank, config("one"))
    (newest,) = list_checkpoints(tmp_path / "one" / "checkpoints")[-1:]
    costs = json.loads((newest / COST_FILE).read_text())
    assert set(costs) == {"per_step_ms", "per_task_ms", "per_row_ms"}
    fitted = costs["per_task_ms"], costs["per_row_ms"]
    assert max(fitted) > 0
    for later in (config("one"), config("two", start_from=str(tmp_path / "one"))):
        assert resolve(later).data.task_cost == fitted
    # A file of a checkpoint without one says nothing.
    (newest / COST_FILE).unlink()
    assert resolve(config("one")).data.task_cost == DataConfig.task_cost


def test_rows_of_a_step_become_a_mean_number_of_tasks(click_logs: Path) -> None:
    split = open_dataset(str(click_logs)).split("train")
    data = DataConfig(path=str(click_logs), rows_per_step=500)
    resolved = resolve(TrainConfig(data=data)).data
    assert resolved.tasks_per_step == round(500 * split.num_episodes / split.num_rows)
    with open_reader(resolved, 0, open_dataset(str(click_logs)), "train", 0, 1) as reader:
        sizes = [batch.num_rows for batch in reader.batches(0)]
    assert len(sizes) == split.num_rows // 500 == reader.num_steps(epoch=3)
    assert max(sizes) - min(sizes) <= 2 * 16


@pytest.mark.parametrize("given", [(1.0,), (1.0, 0.5, 0.1), (0.0, 0.0), (-1.0, 1.0), "fit"])
def test_no_cost_is_refused(given: Any) -> None:
    data = replace(DataConfig(), task_cost=given)
    assert catch_message(ConfigError, task_cost_of, data) == (
        f"data.task_cost = {given!r} is no cost: two numbers are allowed, that of a task and that "
        'of each of its rows, none below 0 and one above, or "fitted". Correct it, or remove the '
        "key"
    )


def test_two_measures_of_a_step_are_refused(click_logs: Path) -> None:
    config = config_from_dict(
        {"data": {"path": str(click_logs), "rows_per_step": 9, "blocks_per_step": 2}}
    )
    dataset = open_dataset(str(click_logs))
    message = catch_message(ConfigError, open_reader, config.data, 0, dataset, "train", 0, 1)
    assert message == (
        "rows_per_step is 9 and blocks_per_step is 2: a step is counted in rows or in blocks, and "
        "in rows of one lane. Set one of them"
    )
