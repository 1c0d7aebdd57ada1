"""W&B and MLflow, neither of which is installed here: modules in their place note what is called.

So these tests hold the calls to what the services' documentation says, not to the services.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gmeta.errors import UserError
from gmeta.hooks.logger import Reading, RunInfo
from gmeta.hooks.services import MLflow, WandB

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
        "id": None,
        "resume": "allow",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "config": info_of(tmp_path).config,
    }
    scalars = {"loss": 0.5, "valid/ndcg@3": 0.25, "valid/auc:buy": 0.5}
    assert calls == [
        ("init", begin),
        ("define_metric", "*", {"step_metric": "step"}),
        ("log", {"step": 3, "epoch": 1, **scalars}),
        ("finish", {"exit_code": 0}),
    ]
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
    assert calls[-2:] == [
        ("log_metrics", scalars, {"step": 3}),
        ("end_run", {"status": "KILLED"}),
    ]
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
    with pytest.raises(UserError) as caught:
        logger.begin(info_of(tmp_path))
    assert str(caught.value) == (
        f"run.loggers names {name!r}, which needs the extra: pip install 'gmeta[{name}]'"
    )
    logger.end("failed")  # closes what was never opened
