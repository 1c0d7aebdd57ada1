"""The yardstick of a stored dataset: the same rows, and no label that it must not know."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gmeta.config.losses import Loss
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import UserError
from gmeta.evaluation.baselines import boosted_trees as trees
from gmeta.evaluation.baselines.block_rows import sample_rows
from gmeta.evaluation.baselines.episode_rows import sample_about
from gmeta.evaluation.baselines.predict_baselines import Baselines, predict_baselines
from metaio import Provenance, open_dataset, write_dataset
from tests.evaluation.baselines.sample import FEATURES, raw_rows, write_data
from tests.support.refusals import catch_message


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "grow_trees", partial(trees.grow_trees, max_trees=30))
    monkeypatch.setattr(trees, "MAX_DRAWS", 3)


def measured(path: Path, loss: Loss, *splits: str, **options: object) -> Baselines:
    config = config_of(path, loss, str(options.pop("valid_split", "")))
    return predict_baselines(
        config.data,
        loss,
        config.outer.huber_delta,
        open_dataset(str(path)),
        splits or ("cold",),
        **options,  # type: ignore[arg-type]
    )


def config_of(path: Path, loss: Loss, valid_split: str = "") -> TrainConfig:
    return config_from_dict(
        {"data": {"path": str(path), "valid_split": valid_split}, "outer": {"loss": loss}}
    )


def predictions(found: Baselines) -> list[np.ndarray]:
    return [model.predictions["prediction"].to_numpy() for model in found.models]


@pytest.mark.parametrize("loss", ["bce", "huber"])
@pytest.mark.parametrize("valid_split", ["", "valid"])
def test_no_test_label_changes_a_prediction(tmp_path: Path, loss: Loss, valid_split: str) -> None:
    clean = measured(write_data(tmp_path / "a", loss), loss, valid_split=valid_split)
    poisoned = measured(
        write_data(tmp_path / "b", loss, poisoned=True), loss, valid_split=valid_split
    )
    labels = [one.models[0].predictions["label"].to_numpy() for one in (clean, poisoned)]
    assert not np.isclose(*labels).any()
    for one, other in zip(predictions(clean), predictions(poisoned), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [one.description for one in clean.models] == [one.description for one in poisoned.models]


def test_rows_are_those_of_the_split_query_rows_alone(tmp_path: Path) -> None:
    dataset = open_dataset(str(write_data(tmp_path / "data", "mse")))
    found = measured(tmp_path / "data", "mse", "cold", "valid")
    table = found.models[0].predictions
    columns = ["split", "task", "support_rows", "label", "draw", "prediction"]
    assert [name for name in table.column_names if name != "task_id"] == columns
    table = table.select(columns)
    expected: list[tuple[str, int, int, float]] = []
    for split in ("cold", "valid"):
        block = dataset.read_block(split, 0)
        for episode, task in enumerate(block.task_T.tolist()):
            first, last = block.row_offsets_T1[episode : episode + 2]
            support = int(block.support_lengths_T[episode])
            expected += [(split, task, support, y) for y in block.label_N[first + support : last]]
    rows = zip(*(table[name].to_pylist() for name in table.column_names[:4]), strict=True)
    assert list(rows) == expected


@pytest.mark.parametrize("num_tasks", [1, 60])
def test_of_large_tasks_at_least_one_is_drawn(num_tasks: int, tmp_path: Path) -> None:
    """As many rows as are wanted are less than a task has: of advertisers, say."""
    with write_dataset(str(tmp_path / "data"), FEATURES, Provenance("user", "label")) as writer:
        writer.split("train").write(raw_rows(num_tasks, "bce"))
    dataset = open_dataset(str(tmp_path / "data"))
    for seed in range(8):
        drawn = sample_rows(dataset, "train", 1, seed)
        assert 1 <= len(drawn.task_T) <= 9
        assert len(sample_about(drawn, 1, seed).task_T) >= 1


def test_without_lightgbm_a_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "is_available", lambda: False)
    found = measured(write_data(tmp_path / "data", "mse"), "mse")
    assert [model.name for model in found.models] == ["bias model"]
    assert found.notes == ("boosted trees: they need the extra, pip install 'gmeta[lightgbm]'",)


def test_trees_have_the_run_s_huber_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(trees, "is_available", lambda: True)
    monkeypatch.setattr(trees, "grow_trees", lambda *given: asked.extend(given))
    config = config_of(write_data(tmp_path / "data", "huber"), "huber")
    config = replace(config, outer=replace(config.outer, huber_delta=7.0))
    dataset = open_dataset(str(tmp_path / "data"))
    found = predict_baselines(config.data, "huber", config.outer.huber_delta, dataset, ["cold"])
    assert asked[-2:] == [7.0, False]
    assert found.notes == ("boosted trees: none, there are too few training tasks",)


def test_trees_can_be_left_out(tmp_path: Path) -> None:
    found = measured(write_data(tmp_path / "data", "mse"), "mse", with_trees=False)
    assert [model.name for model in found.models] == ["bias model"]
    assert found.notes == ("boosted trees: left out, as --no-trees asks",)


def test_the_training_split_has_no_yardstick(tmp_path: Path) -> None:
    found = measured(write_data(tmp_path / "data", "mse"), "mse", "train")
    assert found == Baselines((), ("no yardstick: it is made from train, which is scored",))


def test_what_holds_training_rows_by_another_name_has_no_yardstick(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with write_dataset(str(path), FEATURES, Provenance("user", "label")) as writer:
        for split in ("train", "fit", "valid-cold", "cold"):
            writer.split(split).write(raw_rows(30, "mse"))
    found = measured(path, "mse", "fit", "valid-cold")
    assert found == Baselines((), ("no yardstick: it is made from train, which is scored",))
    found = measured(path, "mse", "valid-cold", "cold", with_trees=False)
    assert set(found.models[0].predictions["split"].to_pylist()) == {"cold"}


def test_data_that_is_named_again_has_no_yardstick_of_its_training_rows(tmp_path: Path) -> None:
    path = write_data(tmp_path / "data", "mse")
    again = open_dataset(str(path))
    found = measured(path, "mse", "train", "cold", with_trees=False, on=again)
    assert set(found.models[0].predictions["split"].to_pylist()) == {"cold"}


def test_the_item_column_is_told_and_an_unknown_one_refused(tmp_path: Path) -> None:
    path = write_data(tmp_path / "data", "mse")
    (model,) = measured(path, "mse", item_column="maker", with_trees=False).models
    assert model.chosen["item_column"] == "maker"
    assert model.description.startswith("mean + item (maker, as asked; prior ")
    assert catch_message(UserError, measured, path, "mse", item_column="film") == (
        f"--item-column = 'film' is no [[single]] column of {path}: it has maker, item. "
        "Name one of them, or leave it out"
    )


def test_clicks_are_predicted_as_probabilities(tmp_path: Path) -> None:
    for table in measured(write_data(tmp_path / "data", "bce"), "bce").models:
        values: pa.ChunkedArray = table.predictions["prediction"]
        assert values.to_numpy().min() > 0
        assert values.to_numpy().max() < 1
