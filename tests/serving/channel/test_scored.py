"""gmeta score: what an exported model is worth on a dataset, by the scores of its predictions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gmeta
from gmeta.errors import UserError
from gmeta.serving.channel import model_scores as scored
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.gate_predictions import GatePredictions, predict_gate
from gmeta.serving.channel.model_scores import score_model
from gmeta.serving.channel.version_packing import pack
from metaio.format.dataset import open_dataset
from tests.serving.channel.models import Model
from tests.support.commands import gmeta as command
from tests.support.increments import write_increments
from tests.support.refusals import catch_message

SIZES = {"item": 60, "city": 60}


def test_the_command_scores_every_split_of_an_increment(tmp_path: Path) -> None:
    """The AUC against pairs counted one by one."""
    path = write_increments(tmp_path / "s", (60, 60), num_tasks=40)[1]
    model = Model.of(SIZES).write(tmp_path / "model", stream="shop")
    out = tmp_path / "out" / "scores.json"
    done = command("score", model, "--on", path, "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    dataset = open_dataset(str(path))
    assert found == score_model(model, dataset)
    assert (found["increment"], found["fingerprint"]) == (2, dataset.fingerprint)
    wanted = {"train": 40, "gate": 10}
    assert {name: split["num_tasks"] for name, split in found["splits"].items()} == wanted
    rows = predict_gate(gmeta.load(model), model, dataset, "gate")
    liked, others = (rows.prediction_N[rows.label_N == one] for one in (1, 0))
    pairs = np.sign(liked[:, None] - others[None, :]).astype(np.float64)
    expected = float((pairs + 1).mean() / 2)
    assert found["splits"]["gate"]["scores"]["auc"] == pytest.approx(expected, abs=1e-12)
    assert f"{expected:.4f}" in done.stdout
    assert f"scored every split of {path} that holds tasks: train, gate. One that" in done.stderr


def test_a_task_of_episodes_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_increments(tmp_path / "s", (60,), num_tasks=40)[0]
    model = Model.of(SIZES).write(tmp_path / "model", stream="shop")

    def of_two(*asked: Any) -> GatePredictions:
        rows = predict_gate(*asked)
        return replace(rows, task_N=rows.task_N % 2)

    monkeypatch.setattr(scored, "predict_gate", of_two)
    found = score_model(model, open_dataset(str(path)), ["gate"])
    assert found["splits"]["gate"]["num_tasks"] == 2


def test_ratings_count_as_liked_from_where_the_run_says(tmp_path: Path) -> None:
    dataset = open_dataset(str(write_increments(tmp_path / "s", (60,), num_tasks=40)[0]))
    told = []
    for rating in (0.0, 1.0):  # 0: from 4 on, and no label is
        model = Model.of(SIZES).write(tmp_path / f"{rating}", "float32", "shop", 2, "mse", rating)
        told.append(score_model(model, dataset, ["gate"])["splits"]["gate"]["scores"])
        rows = predict_gate(gmeta.load(model), model, dataset, "gate")
    assert told[0]["auc"] is None
    liked, others = (rows.prediction_N[rows.label_N == one] for one in (1, 0))
    pairs = np.sign(liked[:, None] - others[None, :]).astype(np.float64)
    assert told[1]["auc"] == pytest.approx(float((pairs + 1).mean() / 2), abs=1e-12)


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    path = write_increments(tmp_path / "s", (60,))[0]
    channel, model = Channel(tmp_path / "channel"), Model.of({"item": 4_000, "city": 30})
    for name in ("1", "2"):
        model.tables["item"][0] += 1
        pack(channel, model.write(tmp_path / name), tmp_path / f"{name}.packed", False)
        channel.promote(tmp_path / f"{name}.packed")
    delta = channel.folder_of(2)
    assert channel.version(2).delta is not None
    assert catch_message(UserError, score_model, delta, open_dataset(str(path))) == (
        f"{delta} is a delta, which predicts nothing alone. Score a version that is full, or an "
        "export"
    )
    done = command("score", tmp_path / "none", "--on", path)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {tmp_path}/none is no folder: an exported model is needed. Give a folder that "
        "`gmeta export` wrote, or CHANNEL/versions/NUMBER of a full version\n",
    )
