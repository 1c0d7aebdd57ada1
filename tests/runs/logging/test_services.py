"""W&B and MLflow. Modules in their place note what is called; the last tests run the packages
themselves, offline, where they are installed: pip install 'gmeta[wandb,mlflow]'."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gmeta.errors import UserError
from gmeta.runs.logging.logger import Reading, RunInfo
from gmeta.runs.logging.tracker_loggers import MLflow, WandB
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S

READING = Reading(3, 1, {"loss": 0.5, "valid": {"ndcg@3": 0.25, "auc:buy": 0.5, "gauc": None}})


class Noting:
    """A module, or a run of one, of which every call is noted."""

    def __init__(self, calls: list[Any], run: Any = None) -> None:
        self._calls, self._run = calls, run

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **named: Any) -> Any:
            self._calls.append((name, *arguments, *([named] if named else [])))
            return self._run

        return note


def info_of(folder: Path, done_steps: int = 0, num_keys: int = 2) -> RunInfo:
    keys = {f"key{number}": number for number in range(num_keys)}
    config = {"model": {**keys, "hidden": [8, 4]}, "run": {"keep_best": True}}
    return RunInfo(folder, config, "auc", done_steps, 10)


def test_wandb_gets_config_and_scalars_by_our_step_and_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = Noting(calls)
    run.id = "abc123"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", Noting(calls, run))
    logger = WandB()
    logger.begin(info_of(tmp_path))
    logger.log(READING)
    logger.end("finished")
    begin = {
        "id": None, "resume": "allow", "name": tmp_path.name, "dir": str(tmp_path),
        "config": info_of(tmp_path).config,
    }  # fmt: skip
    scalars = {"loss": 0.5, "valid/ndcg@3": 0.25, "valid/auc:buy": 0.5}
    assert calls == [
        ("init", begin), ("define_metric", "*", {"step_metric": "step"}),
        ("log", {"step": 3, "epoch": 1, **scalars}), ("finish", {"exit_code": 0}),
    ]  # fmt: skip
    calls.clear()
    again = WandB()
    again.begin(info_of(tmp_path, done_steps=3))
    again.end("failed")
    assert calls[0] == ("init", {**begin, "id": "abc123"})
    assert calls[-1] == ("finish", {"exit_code": 1})


def test_mlflow_gets_parameters_once_in_parts_and_metrics_under_names_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    monkeypatch.setitem(sys.modules, "mlflow", Noting(calls, run))
    logger = MLflow()
    logger.begin(info_of(tmp_path, num_keys=150))
    logger.log(READING)
    logger.end("stopped")
    assert calls[0] == ("start_run", {"run_id": None, "run_name": tmp_path.name})
    parts = [call[1] for call in calls if call[0] == "log_params"]
    assert [len(part) for part in parts] == [100, 52]  # 150 keys, hidden, keep_best
    together = {name: value for part in parts for name, value in part.items()}
    assert together["model.hidden"] == "[8, 4]"
    assert together["run.keep_best"] is True
    scalars = {"loss": 0.5, "valid/ndcg_at_3": 0.25, "valid/auc_buy": 0.5, "epoch": 1}
    expected = [("log_metrics", scalars, {"step": 3}), ("end_run", {"status": "KILLED"})]
    assert calls[-2:] == expected
    calls.clear()
    again = MLflow()
    again.begin(info_of(tmp_path, done_steps=3))
    assert calls == [("start_run", {"run_id": "r1", "run_name": None})]


@pytest.mark.parametrize(("name", "kind"), [("wandb", WandB), ("mlflow", MLflow)])
def test_a_missing_package_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: Any
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    logger = kind()
    expected = f"run.loggers names {name!r}, which needs the extra: pip install 'gmeta[{name}]'"
    assert catch_message(UserError, logger.begin, info_of(tmp_path)) == expected
    logger.end("failed")  # closes what was never opened


# One life of a run, in a process of its own as a trainer is: the packages leave threads and
# servers behind.
LIFE = """
import sys
from pathlib import Path
from gmeta.runs.logging.logger import Reading, RunInfo
from gmeta.runs.logging.hook_registry import LOGGERS
name, folder, done_steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
config = {"model": {f"key{n}": n for n in range(150)}, "run": {"keep_best": True}}
logger = LOGGERS[name]()
logger.begin(RunInfo(folder, config, "auc", done_steps, 10))
values = {"loss": 1 / (done_steps + 1), "valid": {"ndcg@3": 0.25, "auc:buy": 0.5, "gauc": None}}
logger.log(Reading(done_steps + 1, 0, values))
logger.end("finished")
"""


def lived(
    name: str, folder: Path, done_steps: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", LIFE, name, str(folder), str(done_steps)],
        env={**os.environ, **variables}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(find_spec("mlflow") is None, reason="no mlflow here: pip install mlflow")
def test_mlflow_itself_holds_what_both_lives_of_a_run_told(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    for done_steps in (0, 4):
        lived("mlflow", tmp_path, done_steps, MLFLOW_TRACKING_URI=store)
    read = (
        "import json, sys, mlflow\n"
        "client = mlflow.MlflowClient(sys.argv[1])\n"
        "run = client.get_run(open(sys.argv[2]).read())\n"
        "losses = [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, 'loss')]\n"
        "about = [run.info.status, run.info.run_name, len(run.data.params), run.data.metrics]\n"
        "print(json.dumps([*about, losses]))\n"
    )
    command = [sys.executable, "-c", read, store, str(tmp_path / "mlflow-run-id")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    status, name, num_parameters, metrics, losses = json.loads(told.stdout.splitlines()[-1])
    assert (status, name, num_parameters) == ("FINISHED", tmp_path.name, 151)
    assert losses == [[1, 1.0], [5, 0.2]]
    scores = {"valid/ndcg_at_3": 0.25, "valid/auc_buy": 0.5}
    assert metrics == {"loss": 0.2, "epoch": 0.0, **scores}


@pytest.mark.skipif(find_spec("wandb") is None, reason="no wandb here: pip install wandb")
def test_wandb_writes_one_run_in_both_lives_and_nothing_else_when_quiet(tmp_path: Path) -> None:
    variables = {"WANDB_MODE": "offline", "GMETA_VERBOSITY": "quiet"}
    for done_steps in (0, 4):
        done = lived("wandb", tmp_path, done_steps, **variables)
        assert (done.stdout, done.stderr) == ("", "")
    name = (tmp_path / "wandb-run-id").read_text()
    lives = list((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(lives) == 2
    assert all(b"valid/ndcg@3" in life.read_bytes() for life in lives)
