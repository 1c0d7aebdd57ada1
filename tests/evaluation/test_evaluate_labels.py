"""`gmeta evaluate` of several labels: its figures are those made by hand of predictions.parquet."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gmeta.metrics.scores import logloss, mae
from gmeta.metrics.terms import Array
from tests.metrics.scikit import scikit
from tests.support.commands import evaluate, metrics, succeed

DRAWS = 2


def rmse(label_N: Array, prediction_N: Array) -> float:
    return float(np.sqrt(np.square(prediction_N.astype(np.float64) - label_N).mean()))


def auc(label_N: Array, score_N: Array) -> float:
    return float(scikit.roc_auc_score(label_N, score_N))


OF_CLICKS = {"auc": auc, "logloss": logloss}
OF_STARS = {"mae": mae, "rmse": rmse}
MEASURED = {"buy": OF_CLICKS, "click": OF_CLICKS, "stars": OF_STARS, "buy|click": OF_CLICKS}


def done(*arguments: str | Path) -> str:
    """What a command that must not fail prints."""
    ended = succeed(*arguments)
    return ended.stdout


def scored(run: Path, out: Path, *arguments: str) -> None:
    """Evaluate without trees and pictures."""
    ended = evaluate(run, *arguments, "--item-column", "item", "--no-trees", "--out", out)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def folder(labelled: Path) -> Path:
    """A folder with a run of three labels, a plain one, and their evaluation in `out`."""
    folder = labelled
    plain = ("algorithm.name=none", f"run.dir={folder / 'plain'}")
    done("train", folder / "train.toml", *plain)
    ended = evaluate(
        folder / "run", "--against", folder / "plain", "--draws", str(DRAWS),
        "--support-sizes", "0,3", "--item-column", "item", "--no-trees", "--out", folder / "out",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (folder / "stdout").write_text(ended.stdout)
    return folder


def evaluation_of(out: Path) -> dict[str, dict[str, Any]]:
    """What evaluation.json says of each label, the judged one first."""
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return {one["label"]: one for one in (found, *found["labels"])}


def rows_by_hand(table: pa.Table, run: str, label: str, draw: int) -> dict[str, np.ndarray]:
    """Task, label and predictions of the rows of a draw where a label is known."""
    keep = pc.and_(pc.equal(table["run"], run), pc.equal(table["draw"], draw))
    suffix = "" if label == "buy" else f":{label}"
    names = {name: f"{name}{suffix}" for name in ("label", "before", "after")} | {"task": "task"}
    rows = table.filter(keep)
    columns = {name: rows[own].to_numpy(zero_copy_only=False) for name, own in names.items()}
    known_N = ~np.isnan(columns["label"])
    return {name: column[known_N] for name, column in columns.items()}


@pytest.mark.parametrize("label", list(MEASURED))
def test_metrics_by_label_are_those_by_hand(folder: Path, label: str) -> None:
    found = evaluation_of(folder / "out")
    assert list(found) == ["buy", "click", "stars", "buy|click"]
    (group,) = found[label]["groups"]
    table = pq.read_table(folder / "out" / "predictions.parquet")
    stages = [(run, stage) for run in ("run", "plain") for stage in ("before", "after")]
    stages.append(("bias model", "after"))
    assert [(one["run"], one["stage"]) for one in group["results"]] == stages
    for (run, stage), result in zip(stages, group["results"], strict=True):
        drawn = [rows_by_hand(table, run, label, draw) for draw in range(DRAWS)]
        for name, measured in MEASURED[label].items():
            by_hand = np.mean([measured(rows["label"], rows[stage]) for rows in drawn])
            assert result["metrics"][name]["value"] == pytest.approx(by_hand, rel=1e-8)
    assert group["num_rows"] == len(drawn[0]["label"])
    assert len(found[label]["yardsticks"]) == 1


def test_a_label_that_is_not_known_is_left_out_of_its_own_rows_alone(folder: Path) -> None:
    found = evaluation_of(folder / "out")
    rows = {label: one["groups"][0]["num_rows"] for label, one in found.items()}
    assert rows["buy"] == rows["click"] > rows["stars"] > 0
    table = pq.read_table(folder / "out" / "predictions.parquet")
    stored = rows_by_hand(table, "run", "click", 0)
    # A conversion rate: of clicked rows, and the product over the probability of the click.
    given = rows_by_hand(table, "run", "buy|click", 0)
    product = rows_by_hand(table, "run", "buy", 0)
    clicked_N = stored["label"] == 1
    assert rows["buy|click"] == len(given["label"]) == clicked_N.sum()
    np.testing.assert_array_equal(given["label"], product["label"][clicked_N])
    rate_N = product["after"][clicked_N] / stored["after"][clicked_N]
    np.testing.assert_allclose(given["after"], rate_N, rtol=1e-6)


def test_calibration_is_of_each_label_of_clicks(folder: Path) -> None:
    found = evaluation_of(folder / "out")
    table = pq.read_table(folder / "out" / "predictions.parquet")
    assert found["stars"]["groups"][0]["calibration"] == []
    for label in ("buy", "click", "buy|click"):
        drawn = [rows_by_hand(table, "run", label, draw) for draw in range(DRAWS)]
        predicted, positive = (
            sum(float(rows[name].astype(np.float64).sum()) for rows in drawn)
            for name in ("after", "label")
        )
        calibration = found[label]["groups"][0]["calibration"]
        (one,) = (one for one in calibration if (one["run"], one["stage"]) == ("run", "after"))
        assert one["predicted_over_observed"] == pytest.approx(predicted / positive, rel=1e-6)
        told = sum(bin_["num_rows"] for bin_ in one["bins"])
        assert told == sum(len(rows["label"]) for rows in drawn)


def test_console_and_page_show_every_label_within_80_columns(folder: Path) -> None:
    lines = (folder / "stdout").read_text().splitlines()
    assert "run, step 10, label buy" in lines
    assert [line for line in lines if line.startswith("label ")] == [
        "label click, AUC \N{UPWARDS ARROW}",
        "label stars, MAE \N{DOWNWARDS ARROW}",
        "label buy|click, AUC \N{UPWARDS ARROW}",
    ]
    tables = [line for line in lines if line.startswith(("cold ", "   ", "AUC", "MAE"))]
    assert max(map(len, tables)) <= 80
    page = (folder / "out" / "report.html").read_text()
    for label in ("click", "stars", "buy|click"):
        assert f"<h2>Label {label}</h2>" in page
        assert f"<summary>All metrics of {label}</summary>" in page
    assert page.count("<h2>Calibration</h2>") == 3
    assert "<dt>label</dt><dd>buy</dd>" in page


def test_another_label_is_judged_with_the_same_predictions(folder: Path, tmp_path: Path) -> None:
    judged = ("--label", "click", "evaluation.candidates=3", 'evaluation.metrics=["auc", "hr@1"]')
    scored(folder / "run", tmp_path / "out", *judged)
    found = evaluation_of(tmp_path / "out")
    other = evaluation_of(folder / "out")
    assert list(found) == ["click", "buy", "stars", "buy|click"]
    # Candidates stand beside the positive rows of the label that is judged.
    assert list(found["click"]["metrics"]) == ["auc", "hr@1"]
    assert list(found["buy"]["metrics"]) == ["auc"]
    table = pq.read_table(tmp_path / "out" / "predictions.parquet")
    own = table.filter(pc.equal(table["run"], "run"))
    before = pq.read_table(folder / "out" / "predictions.parquet")
    keep = pc.and_(pc.equal(before["run"], "run"), pc.equal(before["draw"], 0))
    before = before.filter(keep)
    np.testing.assert_allclose(own["after:buy"].to_numpy(), before["after"].to_numpy(), atol=1e-6)
    np.testing.assert_array_equal(own["label"].to_numpy(), before["label:click"].to_numpy())
    placed = own["after_above"].to_numpy() >= 0
    np.testing.assert_array_equal(placed, own["label"].to_numpy() == 1)
    assert other["click"]["groups"][0]["num_rows"] == found["click"]["groups"][0]["num_rows"]


def test_validation_scores_each_label_and_the_rate_of_the_clicked(folder: Path) -> None:
    scores = metrics(folder / "run")[-1]["valid"]
    assert {"auc", "auc:click", "mae:stars", "auc:buy|click"} <= set(scores)


def test_validation_on_splits_has_each_label_and_their_mean(folder: Path, tmp_path: Path) -> None:
    run, splits = tmp_path / "run", ("valid", "cold")
    chosen = ('data.valid_split=["valid","cold"]', "run.early_stop_metric=auc:click")
    done("train", folder / "train.toml", *chosen, "run.epochs=1", f"run.dir={run}")
    scores = metrics(run)[-1]["valid"]
    asked = [word for split in splits for word in ("--split", split)]
    # Told its own rate, it adapts as validation had it.
    config = json.loads((run / "config.json").read_text())
    own = f"algorithm.inner_lr={config['algorithm']['inner_lr']}"
    scored(run, tmp_path / "out", own, *asked)
    found = evaluation_of(tmp_path / "out")
    for label, measured in MEASURED.items():
        groups = {group["name"]: group for group in found[label]["groups"]}
        for metric in measured:
            name = metric if label == "buy" else f"{metric}:{label}"
            by_split = [groups[split]["results"][1]["metrics"][metric]["value"] for split in splits]
            logged = [scores[f"{name}/{split}"] for split in splits]
            assert logged == pytest.approx(by_split, rel=1e-6)
            assert scores[name] == pytest.approx(sum(by_split) / 2, rel=1e-6)
