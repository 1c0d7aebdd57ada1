"""A run and its export as the release before this one wrote them (previous/run and previous/model,
of the dataset in tests/metaio/format/previous): this one evaluates, resumes, exports and serves
them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gmeta
from gmeta.config.train_config import config_from_dict
from gmeta.runs.checkpoints.integrity import check_files
from gmeta.runs.checkpoints.progress_file import read_progress
from gmeta.runs.run_folder import list_checkpoints
from tests.support.commands import evaluate, metrics
from tests.support.commands import gmeta as run_gmeta

PREVIOUS = Path(__file__).with_name("previous")
DATASET = PREVIOUS.parents[1] / "metaio" / "format" / "previous" / "data"
SUPPORT = {"item_id": [0, 1, 2], "city": ["Oslo"] * 3, "genres": ["a", "b|c", "c"]}
SUPPORT |= {"price": [3.0, 20.0, 90.0], "clicked": [1, 0, 1]}
QUERY = {"item_id": [3, 99], "city": ["Lima", "Rome"], "genres": ["a|b", "c"], "price": [7.0, 8.0]}
PREDICTED = [0.438147, 0.438238]  # by the previous release


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the run was trained: run and dataset side by side."""
    shutil.copytree(PREVIOUS / "run", tmp_path / "run")
    shutil.copytree(DATASET, tmp_path / "data")
    return tmp_path


def test_a_checkpoint_of_the_previous_release_is_whole() -> None:
    (checkpoint,) = list_checkpoints(PREVIOUS / "run" / "checkpoints")
    check_files(checkpoint)
    assert read_progress(checkpoint).step == 8


@pytest.mark.distributed
def test_a_run_of_the_previous_release_scores_as_it_did_there(folder: Path) -> None:
    was = metrics(folder / "run")[-1]["valid"]
    rate = json.loads((folder / "run" / "config.json").read_text())["algorithm"]["inner_lr"]
    # As its config says: this release would choose a rate.
    ended = evaluate("run", "--split", "valid", f"algorithm.inner_lr={rate}", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    told = json.loads((folder / "run" / "evaluation" / "evaluation.json").read_text())
    (group,) = told["groups"]
    mine = [each for each in group["results"] if each["run"] == told["runs"][0]["name"]]
    (after,) = (each["metrics"] for each in mine if each["stage"] == "after")
    for name in ("auc", "logloss"):
        assert after[name]["value"] == pytest.approx(was[name], abs=1e-5)


@pytest.mark.distributed
def test_a_run_of_the_previous_release_goes_on(folder: Path) -> None:
    config = folder / "run" / "config.json"
    keys = json.loads(config.read_text())
    lines = ["[data]", 'path = "data"', "tasks_per_step = 4", 'valid_split = "valid"']
    (folder / "train.toml").write_text("\n".join(lines))
    same = [
        f"{section}.{key}={json.dumps(keys[section][key])}"
        for section in ("model", "algorithm", "outer")
        for key in keys[section]
    ]
    ended = run_gmeta(
        "train", "train.toml", "run.dir=run", "run.epochs=3", "run.log_every_steps=1", *same,
        "--resume", cwd=folder,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in metrics(folder / "run") if "loss" in line] == [*range(1, 13)]


@pytest.mark.distributed
def test_a_run_of_the_previous_release_is_exported_as_it_was_there(folder: Path) -> None:
    ended = run_gmeta("export", "run", "model", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    before, now = PREVIOUS / "model", folder / "model"
    found = [
        sorted(str(path.relative_to(each)) for path in each.rglob("*.*")) for each in (before, now)
    ]
    assert found[0] == found[1]
    was, told = (json.loads((each / "config.json").read_text()) for each in (before, now))
    for body in (was, told):
        del body["checksum"], body["source"]["exported_at"], body["source"]["torch"]
    # Options of a model or an algorithm were keys of its section.
    mine, theirs = (
        config_from_dict({part: body.pop(part) for part in ("model", "algorithm")}, is_saved=True)
        for body in (told, was)
    )
    assert mine == theirs
    assert known(told, was) == was  # the files' checksums too


def known(told: Any, was: Any) -> Any:
    """What is told without the keys that came later."""
    if not isinstance(was, dict):
        return told
    return {key: known(told[key], was[key]) for key in was}


def test_a_model_of_the_previous_release_predicts_as_it_did_there() -> None:
    model = gmeta.load(PREVIOUS / "model")
    predicted = model.adapt(SUPPORT).predict(QUERY)
    np.testing.assert_allclose(predicted.tolist(), PREDICTED, atol=1e-5)
