"""The functions of gmeta, from a frame to a served prediction, and their errors."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gmeta
from gmeta.errors import UserError
from gmeta.library.command import write_options, write_settings
from gmeta.library.frames import list_inputs
from gmeta.platform.files.tensor_files import read_tensors
from gmeta.runs.run_folder import LOCK_FILE, RunFolder, list_checkpoints
from tests.support.refusals import catch_message
from tests.support.waiting import wait_until

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
    assert run.best_step in as_arrow(run.metrics)["step"].to_pylist()
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
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
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
    with pytest.raises(UserError, match="no channel"):
        gmeta.rollback(tmp_path, show=False)
    with (
        gmeta.serve(tmp_path / "model", verify=False) as url,
        urllib.request.urlopen(f"{url}/status") as answer,
    ):
        assert json.load(answer)["model"] == "model"


@pytest.mark.distributed
def test_an_error_is_the_line_of_the_command(prepared: gmeta.Draft, run: gmeta.TrainedRun) -> None:
    message = catch_message(gmeta.UserError, gmeta.train, prepared.config, SETTINGS, show=False)
    assert message.startswith("run.dir = ")
    assert "is not empty: a new run needs a new folder" in message
    message = catch_message(gmeta.UserError, gmeta.train, {"outer": {"loss": "x"}}, show=False)
    assert "outer.loss" in message


def test_a_notebook_hides_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As the kernel of a notebook sets it: the line would have colours.
    monkeypatch.setenv("FORCE_COLOR", "1")
    message = catch_message(UserError, gmeta.evaluate, tmp_path, show=False)
    assert message.startswith(f"{tmp_path} is no run folder")
    # typer's, in its box.
    message = catch_message(UserError, gmeta.prepare, "log", "schema", "out", foo=1, show=False)
    # As some versions of click and typer have it, and as others do.
    assert message in ("No such option: --foo", "No such option '--foo'.")


@contextmanager
def start_training(
    prepared: gmeta.Draft, root: Path, nproc: int
) -> Iterator["subprocess.Popen[str]"]:
    """A program that trains for ever, once it is under way."""
    settings = SETTINGS | {"run.epochs": 100_000, "run.dir": str(root)}
    code = f"import gmeta; gmeta.train({str(prepared.config)!r}, {settings!r}, nproc={nproc})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith("epoch 1") for line in process.stderr)
        yield process


@pytest.mark.distributed
@pytest.mark.parametrize("nproc", [1, 2])
def test_ctrl_c_ends_every_rank_and_says_what_is_kept(
    prepared: gmeta.Draft, tmp_path: Path, nproc: int
) -> None:
    with start_training(prepared, tmp_path / "run", nproc) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        # Its end is that of the ranks, too: they hold the other side of the pipe.
        said = process.stderr.read()
    assert "KeyboardInterrupt" in said
    assert "interrupted" in said


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process outlives its parent")
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_whose_caller_is_killed_keeps_its_steps(
    prepared: gmeta.Draft, tmp_path: Path, nproc: int
) -> None:
    with start_training(prepared, tmp_path / "run", nproc) as process:
        process.kill()
    folder = RunFolder(tmp_path / "run")
    wait_until(lambda: list_checkpoints(folder.checkpoints), "a checkpoint")
    wait_until(lambda: not (folder.root / LOCK_FILE).exists(), "the lock")


def test_settings_are_written_as_toml() -> None:
    settings = {
        "run.dir": Path("é\U0001f600"),
        "outer": {"dense_lr": np.float32(0.5)},
        "a.b": (1, 2),
    }
    written = ['run.dir="é\U0001f600"', "outer.dense_lr=0.5", "a.b=[1, 2]"]
    assert write_settings(settings) == written
    message = catch_message(UserError, write_settings, {"model": {"hidden": None}})
    assert message.startswith("model.hidden = None is no value of a config")


def test_an_option_that_is_on_is_turned_off() -> None:
    options = write_options(trees=True, verify=False, force=False, step=0, against=[Path("a"), "b"])
    assert options == ["--no-verify", "--step", "0", "--against", "a", "--against", "b"]


def test_a_frame_is_written_without_its_index_and_categories_as_text(tmp_path: Path) -> None:
    words = pa.DictionaryArray.from_arrays([1, None, 0], pa.array(["x", "y"], pa.string_view()))
    frame = pa.table({"__index_level_0__": [7, 8, 9], "word": words})
    (path,) = list_inputs(frame, tmp_path)
    assert pq.read_table(path).to_pydict() == {"word": ["y", None, "x"]}
    # Rows are no paths.
    message = catch_message(UserError, list_inputs, [{"word": "x"}], tmp_path)
    assert message.startswith("a log of type list cannot be read as columns: ")


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
