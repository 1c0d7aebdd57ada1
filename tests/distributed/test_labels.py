"""Labels that the loss is not defined for end a run before their step, wherever they are."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from gmeta.cli.commands.error_messages import format_error
from gmeta.config.inputs import ItemFeaturesConfig
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.data.label_checks import check_first_labels, check_labels
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.steps import stop_on_error
from gmeta.distributed.stopping import Stop
from gmeta.errors import ConfigError
from gmeta.runs.build import build
from gmeta.training import train
from metaio import (
    BatchReader,
    FormatError,
    Provenance,
    Rows,
    TaskBatch,
    open_dataset,
    write_dataset,
)
from metaio.read.batch import empty_batch
from tests.distributed.harness import on_ranks
from tests.metaio.conftest import FEATURES, make_rows

NUM_TASKS, BLOCK_ROWS = 40, 60
TASK, ROW = 31, 2  # of the wrong label, which is in none of the first blocks
REMEDY = (
    'bce takes 0 to 1. Set outer.loss = "mse" or "huber" for ratings, or give the label a '
    "threshold in the schema and prepare again"
)


def clicks(wrong: float | None = None) -> Rows:
    """40 tasks; one label may be wrong."""
    rows = make_rows(NUM_TASKS, seed=1)
    if wrong is None:
        return rows
    first = int(rows.row_lengths_T[:TASK].sum())
    assert rows.row_lengths_T[TASK] > ROW
    label_N = rows.label_N.copy()
    label_N[first + ROW] = wrong
    return replace(rows, label_N=label_N)


def written(folder: Path, **splits: Rows) -> str:
    out = str(folder / "data")
    about = Provenance(task="user", label="stars")
    with write_dataset(out, FEATURES, about, block_rows=BLOCK_ROWS) as writer:
        for split, rows in splits.items():
            writer.split(split).write(rows)
    return out


def config_of(path: str, folder: Path, **data: object) -> TrainConfig:
    return config_from_dict(
        {
            "data": {"path": path, "tasks_per_step": 8, **data},
            "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
            "run": {"dir": str(folder / "run"), "device": "cpu", "epochs": 1},
        }
    )


def refusal_of_training(ranks: Ranks, config: TrainConfig) -> str:
    try:
        train(config, ranks)
    except ConfigError as error:
        return format_error(error)[0]
    return "trained"


@pytest.mark.distributed
def test_a_wrong_label_that_item_statistics_meet_leaves_no_run_behind(tmp_path: Path) -> None:
    config = config_of(written(tmp_path, train=clicks(wrong=4.0)), tmp_path)
    columns = ItemFeaturesConfig(columns=("*",))
    (line,) = on_ranks(1, refusal_of_training, replace(config, item_features=columns))
    assert line.startswith('outer.loss = "bce", but row')
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.distributed
def test_a_caller_of_train_is_told_the_row_and_task_of_a_wrong_label(tmp_path: Path) -> None:
    config = config_of(written(tmp_path, train=clicks(wrong=4.0)), tmp_path)
    # As the first block has none.
    check_first_labels("train", ["bce"], open_dataset(config.data.path))
    (line,) = on_ranks(1, refusal_of_training, config)
    assert line == (
        f'outer.loss = "bce", but row {ROW} of task {1000 + TASK} in split train has label 4 '
        f"(column stars): {REMEDY}"
    )


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_a_rating_that_is_no_number_is_named_with_its_row(tmp_path: Path, loss: str) -> None:
    dataset = open_dataset(written(tmp_path, train=clicks(wrong=float("nan"))))
    with (
        BatchReader(dataset, "train", tasks_per_step=8, shuffle=False) as reader,
        pytest.raises(ConfigError) as caught,
    ):
        list(check_labels(reader.batches(0), [loss], dataset, "train"))
    assert str(caught.value) == (
        f'outer.loss = "{loss}", but row {ROW} of task {1000 + TASK} in split train has label nan '
        f"(column stars): {loss} takes finite numbers. Mend the column and prepare again"
    )


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_end_with_the_wrong_label_of_one(tmp_path: Path, world_size: int) -> None:
    """Without it the others would end with a broken collective."""
    config = config_of(written(tmp_path, train=clicks(wrong=4.0)), tmp_path)
    (line,) = set(on_ranks(world_size, refusal_of_training, config))
    assert re.fullmatch(
        f'outer.loss = "bce", but row {ROW} of task {1000 + TASK} in split train has label 4 '
        rf"\(column stars\): {re.escape(REMEDY)} \(met by rank \d\)",
        line,
    )


def test_a_block_that_cannot_be_read_asks_all_ranks_to_stop_before_its_step() -> None:
    batch, stop = empty_batch(1, 1, 0, 0), Stop()

    def stored() -> Iterator[TaskBatch]:
        yield batch
        raise FormatError("block 7 is damaged. Copy it again")

    batches = stop_on_error(stored(), FEATURES, stop)
    assert next(batches) is batch
    assert not stop.is_requested
    # Every batch from here on is there, and empty: the ranks agree before they take a step.
    assert [next(batches).num_rows for _ in range(3)] == [0, 0, 0]
    assert stop.is_requested
    assert str(stop.problem) == "block 7 is damaged. Copy it again"


@pytest.mark.distributed
def test_all_ranks_refuse_a_wrong_first_block_and_make_no_folder(tmp_path: Path) -> None:
    rows = make_rows(NUM_TASKS)
    config = config_of(written(tmp_path, train=replace(rows, label_N=rows.label_N + 3)), tmp_path)
    first, second = on_ranks(2, refusal_of_training, config)
    assert first == second
    assert first.startswith('outer.loss = "bce", but label column stars of split train holds 3.')
    assert first.endswith(REMEDY)
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_a_wrong_label_of_a_split_that_is_scored_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, train=clicks(), valid=clicks(wrong=-1.0))
    (line,) = on_ranks(1, refusal_of_training, config_of(path, tmp_path, valid_split="valid"))
    assert line.startswith(
        f'outer.loss = "bce", but row {ROW} of task {1000 + TASK} in split valid has label -1 '
    )


@pytest.mark.parametrize(
    ("loss", "wrong", "is_refused"),
    [
        ("bce", np.nan, True), ("bce", 1.0, False), ("mse", 4.0, False), ("mse", np.nan, True),
        ("huber", np.inf, True), ("softmax", -1.0, True), ("softmax", 4.0, False),
        ("pairwise", -1.0, False),
    ],
)  # fmt: skip
def test_a_loss_takes_what_it_is_defined_for(
    tmp_path: Path, loss: str, wrong: float, is_refused: bool
) -> None:
    dataset = open_dataset(written(tmp_path, train=clicks(wrong)))
    with BatchReader(dataset, "train", tasks_per_step=8, seed=3) as reader:
        stored = list(reader.batches(0))
    checked = check_labels(iter(stored), [loss], dataset, "train")
    if not is_refused:
        assert [a is b for a, b in zip(checked, stored, strict=True)] == [True] * len(stored)
        return
    with pytest.raises(ConfigError) as caught:
        list(checked)
    begin = f'outer.loss = "{loss}", but row {ROW} of task {1000 + TASK} in split train has label '
    assert str(caught.value).startswith(f"{begin}{wrong:g} (column stars): {loss} takes ")


@pytest.mark.parametrize("source", ["static", "service"])
@pytest.mark.parametrize("key", ["train_split", "valid_split"])
def test_an_empty_split_is_refused_of_any_source(tmp_path: Path, source: str, key: str) -> None:
    path = written(tmp_path, train=clicks(), empty=make_rows(0))
    with pytest.raises(ConfigError) as caught:
        build(config_of(path, tmp_path, source=source, **{key: cast(object, "empty")}))
    assert str(caught.value) == (
        f"data.{key} = 'empty' has 0 episodes in {path}: at least one is needed. Name another "
        "split, or prepare data with tasks in this one"
    )
