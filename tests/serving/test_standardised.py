"""A run on labels in seconds, standardised inside, against one on labels standardised by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gmeta
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.data.opening import open_data
from gmeta.distributed.ranks import Ranks
from gmeta.errors import UserError
from gmeta.runs.build import estimate_moments
from gmeta.runs.checkpoints.selected_checkpoint import check_config
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.serving.export import export_run
from gmeta.training import train
from metaio import Rows, open_dataset
from tests.distributed.harness import on_ranks
from tests.support.exported import evaluated, rows_of_split
from tests.support.increments import write_increments
from tests.support.refusals import catch_message

SECONDS, CAPACITIES = 3600.0, (30, 100)


def seconds(rows: Rows) -> Any:
    return (rows.label_N * rows.dense_NK[:, 0] * SECONDS).astype(np.float32)


def config_of(data: Path, folder: Path, **more: Any) -> TrainConfig:
    return config_from_dict(
        {
            "data": {"path": str(data), "tasks_per_step": 16},
            "model": {"name": "melu", "embedding_dim": 4, "hidden": [8], "linear_start": True},
            "support_features": {"task": True, "residual_of": "item"},
            "item_features": {"columns": ["item"]},
            "outer": {"loss": "mse"},
            "run": {"dir": str(folder), "device": "cpu", "epochs": 2, **more.pop("run", {})},
            **more,
        }
    )


def train_on_rank(ranks: Ranks, configs: list[TrainConfig]) -> None:
    for config in configs:
        train(config, ranks)


def max_label(data: Path) -> float:
    return float(open_dataset(str(data)).read_block("train", 0).label_N.max())


@pytest.mark.distributed
def test_evaluation_export_and_stream_are_those_of_labels_standardised_by_hand(
    tmp_path: Path,
) -> None:
    inside = {"labels": {"standardise": True}}
    first, second = write_increments(tmp_path / "raw", CAPACITIES, label=seconds)
    raw = config_of(first, tmp_path / "run", **inside)
    mean, deviation = estimate_moments("train", [raw.outer.loss], open_data(raw.data))
    by_hand = write_increments(
        tmp_path / "units", CAPACITIES, label=lambda rows: (seconds(rows) - mean) / deviation
    )
    units = config_of(by_hand[0], tmp_path / "by-hand")
    following = config_of(
        second, tmp_path / "next", run={"continue_from": str(tmp_path / "run")}, **inside
    )
    on_ranks(1, train_on_rank, [raw, units, following])
    ours, theirs = (evaluated(tmp_path / name, "gate") for name in ("run", "by-hand"))
    for stage in ("before", "after"):
        expected_N = theirs[stage].to_numpy() * deviation + mean
        np.testing.assert_allclose(ours[stage].to_numpy(), expected_N, atol=1e-4 * deviation)
    # Exported, as evaluated.
    export_run(tmp_path / "run", tmp_path / "model")
    support, query = rows_of_split(first, "gate")
    served = gmeta.load(tmp_path / "model").predict_tasks(support, query)
    np.testing.assert_allclose(served.after_N, ours["after"].to_numpy(), atol=1e-5 * deviation)
    task = support.slice(0, 3).set_column(1, "click", pa.array([1.0, 2.0, 9e9]))
    assert catch_message(UserError, gmeta.load(tmp_path / "model").adapt, task) == (
        f"label column click holds 9e+09, and this model was trained on labels from 0 to "
        f"{max_label(first):g}. Bring it to their unit, or leave the row out"
    )
    # The stream's next run keeps the units of its first.
    for name in ("run", "next"):
        assert RunFolder(tmp_path / name).read_config().labels.moments == (mean, deviation)
    checkpoint = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    changed = replace(RunFolder(tmp_path / "run").read_config(), labels=units.labels)
    message = catch_message(UserError, check_config, checkpoint, changed)
    assert message == (
        f"labels.standardise = False, but checkpoint {checkpoint} was trained with True, and its "
        "weights mean nothing with another. Set it as it was, or train a new run, which may begin "
        "with run.start_from"
    )
