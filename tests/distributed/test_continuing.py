"""A run goes on with the next increment of a stream, on any number of ranks, stopped or not.
Mutants that these tests catch: rows reset or sums discounted again at a resume, gate tasks trained,
the increment scored after its first step, or with what its own rows say of its items."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.evaluation.evaluate import evaluate_run
from gmeta.metrics.scores import logloss
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.run_folder import PREQUENTIAL_FILE, RunFolder, list_checkpoints
from gmeta.serving.export import CheckpointReader
from gmeta.training import train
from tests.antdt.faults.counting import COUNTS_FILE, count_tasks
from tests.distributed.harness import on_ranks
from tests.support.increments import write_increments

NUM_TASKS = 48
RESET = (5, 7, 11)


def config_of(run: Path, increment: Path, before: Path | None = None, **keys: Any) -> TrainConfig:
    """Three steps on an increment; `keys` are section__key."""
    raw: dict[str, dict[str, Any]] = {
        "data": {"path": str(increment), "tasks_per_step": 16},
        "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
        "outer": {"adagrad_decay": 0.5, "sparse_lr": 0.2, "dense_lr": 0.05},
        "run": {"dir": str(run), "device": "cpu", "log_every_steps": 1},
    }
    if before is not None:
        raw["run"]["continue_from"] = str(before)
    for name, value in keys.items():
        section, key = name.split("__")
        raw.setdefault(section, {})[key] = value
    return config_from_dict(raw)


def train_each(ranks: Ranks, configs: list[TrainConfig]) -> None:
    for config in configs:
        train(config, ranks)


def newest(run: Path) -> Path:
    return list_checkpoints(RunFolder(run).checkpoints)[-1]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of tables and layers."""
    summary, reader = summarise_checkpoint(checkpoint), CheckpointReader(checkpoint)
    names = [f"model.learner.{layer.name}" for layer in summary.layers]
    for table in (one.name for one in summary.tables):
        names.append(f"model.tables.embeddings.{table}.weight")
        state = f"optimizer.state.tables.embeddings.{table}.weight.{table}"
        names.append(f"{state}.momentum1")
    return reader.read(names)


@pytest.mark.distributed
def test_any_ranks_go_on_to_the_same_model_and_a_stop_changes_nothing(tmp_path: Path) -> None:
    first, second, third = write_increments(tmp_path / "shop", reset_rows=RESET)
    runs = {name: tmp_path / name for name in ("one", "two", "whole", "stopped", "on-2", "on-4")}
    near = {"neighbours__column": "item", "neighbours__count": 4}
    whole = config_of(runs["whole"], third, runs["two"], **near)
    stopped = config_of(runs["stopped"], third, runs["two"], run__max_steps=2, **near)
    configs = [
        config_of(runs["one"], first, **near), config_of(runs["two"], second, runs["one"], **near),
        whole, stopped, replace(stopped, run=replace(stopped.run, max_steps=0)),
    ]  # fmt: skip
    on_ranks(1, train_each, configs)
    unbroken = tensors(newest(runs["whole"]))
    assert unbroken["model.tables.embeddings.item.weight"].shape == (300, 4)
    for name, values in tensors(newest(runs["stopped"])).items():
        assert torch.equal(values, unbroken[name]), name
    for num_ranks in (2, 4):
        run = runs[f"on-{num_ranks}"]
        on_ranks(num_ranks, train_each, [config_of(run, third, runs["two"], **near)])
        for name, values in tensors(newest(run)).items():
            # Neighbours are counted to the bit.
            most = 0.0 if "neighbours" in name else 1e-6
            torch.testing.assert_close(values, unbroken[name], rtol=0, atol=most, msg=name)
    lineage = read_about(newest(runs["on-2"]))["lineage"]
    assert [(one["increment"], one["steps"]) for one in lineage] == [(1, 3), (2, 3), (3, 3)]
    # Reused rows that the third increment does not hold are as they begin.
    weight = unbroken["model.tables.embeddings.item.weight"]
    sums = unbroken["optimizer.state.tables.embeddings.item.weight.item.momentum1"]
    assert weight[list(RESET)].std() < 0.2
    assert sums[list(RESET)].tolist() == [0.0] * len(RESET)


@pytest.mark.distributed
def test_an_increment_that_is_skipped_leaves_the_rows_that_it_reused_anew(tmp_path: Path) -> None:
    first, _, third = write_increments(tmp_path / "shop", reset_rows=RESET, reset_in=[2])
    runs = [tmp_path / "one", tmp_path / "three"]
    still = {"outer__sparse_lr": 0.0, "outer__adagrad_decay": 1.0, "run__prequential": False}
    configs = [
        config_of(runs[0], first),
        config_of(runs[1], third, runs[0], run__skip_increments=[2], **still),
    ]
    on_ranks(1, train_each, configs)
    lineage = read_about(newest(runs[1]))["lineage"]
    assert [one["increment"] for one in lineage] == [1, 3]
    name = "model.tables.embeddings.item.weight"
    before, after = (tensors(newest(run))[name] for run in runs)
    kept = [row for row in range(len(before)) if row not in RESET]
    assert torch.equal(after[kept], before[kept])
    assert (after[list(RESET)] != before[list(RESET)]).any(1).all()


@pytest.mark.distributed
def test_an_increment_is_scored_before_it_is_trained_on(tmp_path: Path) -> None:
    first, second = write_increments(tmp_path / "shop", (30, 100))
    runs = [tmp_path / name for name in ("one", "still", "silent")]
    # Without rates the model stays what it was when the increment came.
    still = {"outer__sparse_lr": 0.0, "outer__dense_lr": 0.0, "data__valid_split": "gate"}
    still |= {"run__early_stop_patience": 9}
    configs = [
        config_of(runs[0], first),
        config_of(runs[1], second, runs[0], **still),
        config_of(runs[2], second, runs[0], run__prequential=False, run__max_steps=1),
    ]
    on_ranks(2, train_each, configs)
    told = json.loads((runs[1] / PREQUENTIAL_FILE).read_text())
    assert (told["increment"], told["trained_on"]) == (2, [1])
    expected = {"train": NUM_TASKS, "gate": NUM_TASKS // 4}
    assert {name: one["num_tasks"] for name, one in told["splits"].items()} == expected
    (valid,) = [line["valid"] for line in RunFolder(runs[1]).read_metrics() if "valid" in line]
    assert told["splits"]["gate"]["scores"] == pytest.approx(valid, abs=1e-7)
    assert not (runs[0] / PREQUENTIAL_FILE).exists()
    assert not (runs[2] / PREQUENTIAL_FILE).exists()


def train_and_evaluate(ranks: Ranks, configs: list[TrainConfig], on: Path) -> float:
    """Train; the logloss of the first run on the split `train` of another dataset."""
    train_each(ranks, configs)
    first = configs[0]
    found = evaluate_run(Path(first.run.dir), "one", [], ranks, first.algorithm, on=str(on))
    assert found is not None
    rows = found.predictions.filter(pc.equal(found.predictions["split"], "train"))
    return logloss(rows["label"].to_numpy(), rows["after"].to_numpy())


@pytest.mark.distributed
def test_a_forecast_is_the_served_models_before_the_increments_labels(tmp_path: Path) -> None:
    # No value is new to the second increment, so that the model of the first knows all of its rows.
    first, second = write_increments(tmp_path / "shop", (30, 30))
    known = {"item_features__columns": ["item"], "item_features__shrinkage": 0.0}
    known |= {"neighbours__column": "item", "neighbours__count": 4}
    one = config_of(tmp_path / "one", first, **known)
    two = config_of(tmp_path / "two", second, tmp_path / "one", **known)
    (served,) = on_ranks(1, train_and_evaluate, [one, two], second)
    told = json.loads((tmp_path / "two" / PREQUENTIAL_FILE).read_text())
    assert told["splits"]["train"]["scores"]["logloss"] == pytest.approx(served, abs=1e-7)


def train_and_count(ranks: Ranks, config: TrainConfig) -> None:
    count_tasks()
    train(config, ranks)


@pytest.mark.distributed
@pytest.mark.parametrize("source", ["static", "service"])
def test_an_increments_tasks_are_trained_once_the_gates_never(tmp_path: Path, source: str) -> None:
    first, second = write_increments(tmp_path / "shop", (30, 100))
    one, two = tmp_path / "one", tmp_path / "two"
    on_ranks(2, train_and_count, config_of(one, first, data__source=source))
    keys = {"data__source": source, "run__checkpoint_every_steps": 1}
    if source == "service":  # stopped inside the epoch, and gone on with by another number of ranks
        on_ranks(2, train_and_count, config_of(two, second, one, run__max_steps=2, **keys))
    on_ranks(1, train_and_count, config_of(two, second, one, **keys))
    for number, run in enumerate((one, two), start=1):
        counts = json.loads((newest(run) / COUNTS_FILE).read_text())
        tasks = range(1000 * number, 1000 * number + NUM_TASKS)
        assert counts == {str(task): 1 for task in tasks}
