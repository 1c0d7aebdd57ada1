"""The functions of gmeta, from a frame to a served prediction, and their errors."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gmeta
from gmeta.platform.files.tensor_files import read_tensors
from tests.support.refusals import catch_message

SETTINGS: dict[str, Any] = {
    "run.epochs": 2, "run.device": "cpu", "model.hidden": [8], "model.embedding_dim": 4,
    "neighbours.column": "",
}  # fmt: skip


def make_log(num_users: int = 60) -> pa.Table:
    """Clicks of users on items, ten rows each."""
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(num_users), 10)
    item = rng.integers(0, 20, user.size)
    price = rng.random(user.size).round(2)
    click = (rng.random(user.size) < np.where((item + user) % 2 == 0, 0.8, 0.2)).astype(np.int64)
    return pa.table({"user": user, "item": item, "price": price, "click": click})


def as_arrow(frame: Any) -> pa.Table:
    """A frame of pandas, where it is installed, as an Arrow table."""
    return frame if isinstance(frame, pa.Table) else pa.Table.from_pandas(frame)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> gmeta.Draft:
    """A schema and a config whose dataset is there."""
    root = tmp_path_factory.mktemp("library")
    draft = gmeta.init(make_log(), root, task="user", label="click", show=False)
    data = gmeta.prepare(make_log(), draft.schema, root / "data", show=False)
    assert data.path.is_dir()
    return draft


@pytest.fixture(scope="module")
def run(prepared: gmeta.Draft) -> gmeta.TrainedRun:
    return gmeta.train(prepared.config, SETTINGS, show=False)


@pytest.mark.distributed
def test_a_run_has_its_metrics_and_config(run: gmeta.TrainedRun) -> None:
    assert run.config["run"]["epochs"] == 2
    assert {"step", "loss"} <= set(as_arrow(run.metrics).column_names)
    assert run.valid
    assert "<table>" in run._repr_html_()


@pytest.mark.distributed
def test_the_command_line_trains_to_the_same_bits(
    run: gmeta.TrainedRun, prepared: gmeta.Draft
) -> None:
    words = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    other = prepared.config.parent / "by-hand"
    command = [sys.executable, "-m", "gmeta", "train", str(prepared.config), *words]
    subprocess.run([*command, f"run.dir={other}"], check=True, capture_output=True)
    model = gmeta.export(run, other.parent / "export", show=False)
    again = gmeta.export(other, other.parent / "export-by-hand", show=False)
    assert model.config.features == again.config.features
    folder, twin = other.parent / "export", other.parent / "export-by-hand"
    for path in sorted(folder.glob("*.safetensors")):
        ours, theirs = read_tensors(path), read_tensors(twin / path.name)
        assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.distributed
def test_a_report_has_a_table_and_a_picture(run: gmeta.TrainedRun, tmp_path: Path) -> None:
    report = gmeta.evaluate(run, out=tmp_path / "report", trees=False, show=False)
    assert report.path.exists()
    assert "before" in report._repr_html_()
    table = as_arrow(report.table)
    assert {"group", "model", "stage", "auc", "auc low"} <= set(table.column_names)
    figure = report.figure()
    assert figure.axes[0].get_xlabel().startswith("AUC")


@pytest.mark.distributed
def test_a_model_is_exported_loaded_promoted_and_served(
    run: gmeta.TrainedRun, tmp_path: Path
) -> None:
    model = gmeta.export(run, tmp_path / "model", show=False)
    rows = make_log(1).to_pydict()
    user = model.adapt(rows)
    assert len(user.predict(rows)) == 10
    assert gmeta.promote(tmp_path / "model", tmp_path / "channel", show=False) == 1
    with gmeta.serve(tmp_path / "model") as url, urllib.request.urlopen(f"{url}/status") as answer:
        assert json.load(answer)["model"] == "model"


@pytest.mark.distributed
def test_an_error_is_the_line_of_the_command(prepared: gmeta.Draft, run: gmeta.TrainedRun) -> None:
    message = catch_message(gmeta.UserError, gmeta.train, prepared.config, SETTINGS, show=False)
    assert message.startswith("run.dir = ")
    assert "is not empty: a new run needs a new folder" in message
    message = catch_message(gmeta.UserError, gmeta.train, {"outer": {"loss": "x"}}, show=False)
    assert "outer.loss" in message


def test_a_log_that_is_no_frame_is_refused_by_its_type(tmp_path: Path) -> None:
    message = catch_message(gmeta.UserError, gmeta.init, 7, tmp_path)
    assert message.startswith("a log of type int cannot be read as columns: ")


def test_importing_gmeta_loads_nothing_and_lists_its_functions() -> None:
    code = (
        "import sys, gmeta; assert 'train' in dir(gmeta) and 'torch' not in sys.modules, 0; "
        "gmeta.train; assert 'torch' not in sys.modules, 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
    assert set(gmeta.__all__) <= set(dir(gmeta))
    for name in gmeta.__all__:
        assert getattr(gmeta, name) is not None
