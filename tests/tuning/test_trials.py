"""A trial's process, from its training to its score."""

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gmeta.cli.commands.work import trial_process as tune
from gmeta.config.train_config import config_from_dict
from gmeta.errors import GMetaError, NotWrittenError, UserError
from gmeta.tuning import trials
from gmeta.tuning.trials import TrialRunner


def test_what_was_trained_is_gone_before_it_is_scored_as_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = SimpleNamespace(device=torch.device("cpu"))
    matmul, trained = torch.backends.cuda.matmul, []

    def train(*_: Any) -> Any:
        model = torch.nn.Linear(1, 1)
        model.cycle = [model]  # type: ignore[assignment]
        trained.append(weakref.ref(model))
        matmul.fp32_precision = "tf32"
        return SimpleNamespace(root=tmp_path)

    def evaluate(*_: Any) -> Any:
        found = trained[0]() is None, matmul.fp32_precision
        raise UserError(str(found))

    def work_alone(device: str, timeout_s: int, told: Any, work: Callable[[Any], None]) -> None:
        work(ranks)

    for name, fake in (("train", train), ("evaluate_run", evaluate), ("run_as_rank", work_alone)):
        monkeypatch.setattr(tune, name, fake)
    before = matmul.fp32_precision
    try:
        with pytest.raises(UserError, match="True, 'ieee'"):
            tune._train(config_from_dict({}), None)  # type: ignore[arg-type]
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("error", "is_counted"),
    [
        (NotWrittenError("checkpoint x cannot be written", "Go on with --resume"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), True),
        (UserError("data.path is empty"), True),
    ],
)
def test_a_trial_that_a_full_disk_ended_ends_the_study_and_is_not_counted(
    error: Exception, is_counted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left, said = Mock(), Mock()
    monkeypatch.setattr(tune.os, "_exit", left)
    monkeypatch.setattr(tune.os, "dup2", Mock())
    monkeypatch.setattr(tune, "_train", Mock(side_effect=error))
    tune.run_as_trial("train", {}, str(tmp_path / "log"), 0, said)
    told = said.send.call_args.args[0]
    study = Mock()
    study.trials.return_value = []
    runner = TrialRunner(study, tmp_path, "auc", Mock(), Mock())
    trial = Mock(**{"process.exitcode": left.call_args.args[0]}, pruned=False)
    runner._running[3] = trial
    monkeypatch.setattr(trials, "wait_for_report", lambda *_: told)
    if is_counted:
        runner._end(3, trial)
        study.finish_trial.assert_called_once_with(3, "failed", told.failure)
    else:
        with pytest.raises(GMetaError, match=r"^trial 3: .*\. It is not counted: once there is "):
            runner._end(3, trial)
        assert "--resume" not in told.failure
        study.finish_trial.assert_not_called()


def test_trials_take_the_gpus_by_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places: list[int] = []

    def process(target: Any, args: Any, daemon: bool) -> Mock:
        places.append(args[2])
        return Mock()

    context = Mock(Process=process, **{"Pipe.return_value": (Mock(), Mock())})
    study = Mock(**{"config.return_value": config_from_dict({})})
    runner = TrialRunner(study, tmp_path, "auc", Mock(), context)
    for number in range(4):
        runner._start(number, {})
    del runner._running[1]  # it has ended, and its place is free
    runner._start(4, {})
    assert places == [0, 1, 2, 3, 1]
    monkeypatch.setattr(tune.os, "_exit", Mock())
    monkeypatch.setattr(tune.os, "dup2", Mock())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "0")
    on = []
    monkeypatch.setattr(tune, "_train", lambda *_: on.append(os.environ["LOCAL_RANK"]))
    for place in places:
        tune.run_as_trial("train", {}, str(tmp_path / "log"), place, Mock())
    assert on == ["0", "1", "2", "0", "1"]
