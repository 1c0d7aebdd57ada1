"""Where a run's readings go, who hears of its steps, and what becomes of a hook that fails."""

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer, record_writer

from gmeta.config.train_config import RunConfig, TrainConfig
from gmeta.distributed.stopping import Stop, StoppedError
from gmeta.errors import ConfigError, GMetaError
from gmeta.platform.verbosity import QUIET, VERBOSE, VERBOSITY_VARIABLE
from gmeta.runs.logging import callback_state, run_hooks
from gmeta.runs.logging.callback import Callback, Run
from gmeta.runs.logging.file_loggers import TensorBoard
from gmeta.runs.logging.logger import Logger, Reading
from gmeta.runs.logging.run_hooks import RunHooks
from gmeta.runs.run_folder import RunFolder
from gmeta.runs.run_progress import RunProgress
from tests.support.refusals import catch_message

HERE = __name__
READING = {"loss": 0.5, "samples_per_s": 12345.6, "data_wait_share": 0.25}


class Recorder(Logger, Callback):
    """A logger and a callback that note their calls; `fails_in` names those that raise."""

    calls: list[tuple[Any, ...]]
    fails_in: tuple[str, ...]

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "begin", "log", "end")):

            def note(*arguments: Any) -> None:
                Recorder.calls.append((name, *arguments))
                if name in Recorder.fails_in:
                    raise ZeroDivisionError("of somebody's own")

            return note
        return super().__getattribute__(name)


Recorder.__abstractmethods__ = frozenset()  # its methods are made when they are asked for


class Silent(Logger):
    """One whose calls named in `silent_in` do not return before `released` is set."""

    calls: list[str]
    silent_in: str
    released: threading.Event

    def begin(self, run: Any) -> None:
        self._called("begin")

    def log(self, reading: Reading) -> None:
        self._called("log")

    def end(self, status: str) -> None:
        self._called("end")

    def _called(self, what: str) -> None:
        Silent.calls.append(what)
        if what == Silent.silent_in:
            Silent.released.wait()


@pytest.fixture
def silent() -> Iterator[type[Silent]]:
    """Silent, whose thread ends with the test."""
    Silent.calls, Silent.released = [], threading.Event()
    yield Silent
    Silent.released.set()


class Needy(Callback):
    """One that is made with an argument."""

    def __init__(self, what: str) -> None:
        raise AssertionError(what)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which has nobody to wait for; nothing was noted yet."""
    monkeypatch.setattr(callback_state, "broadcast_value", lambda value, ranks: value)
    monkeypatch.setattr(callback_state, "gather_values", lambda value, ranks: [value])
    for name in ("run_on_first", "run_on_all"):
        monkeypatch.setattr(run_hooks, name, lambda work, ranks: work())
    Recorder.calls, Recorder.fails_in = [], ()


def of_rank(rank: int, world_size: int = 1) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


@contextmanager
def begun(
    folder: Path, total_steps: int = 20, done_steps: int = 0, rank: int = 0, **run: Any
) -> Iterator[tuple[RunHooks, Stop]]:
    """The hooks of a run in its folder."""
    folder.mkdir(exist_ok=True)
    hooks = RunHooks(TrainConfig(run=RunConfig(dir=str(folder), **run)), of_rank(rank))
    stop = Stop()
    with hooks:
        hooks.begin(RunProgress(step=done_steps), total_steps, stop)
        yield hooks, stop


def board_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(RunFolder(folder).tensorboard)).Reload()


def test_readings_are_json_lines_and_scalars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # lines are not cut: who greps a log finds whole readings
    folder = tmp_path / "run"
    scores = {"auc": 0.75, "gauc": None}
    with begun(folder) as (hooks, _):
        hooks.log(10, 0, {**READING, "dense_lr": 0.001})
        hooks.record_validation(20, 1, scores)
    lines = RunFolder(folder).metrics.read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first == {"step": 10, "epoch": 0, **READING, "dense_lr": 0.001}
    assert second == {"step": 20, "epoch": 1, "valid": scores}
    board = board_of(folder)
    assert sorted(board.Tags()["scalars"]) == [
        "data_wait_share",
        "dense_lr",
        "loss",
        "samples_per_s",
        "valid/auc",  # gauc is undefined: no point, instead of a zero
    ]
    assert [(point.step, point.value) for point in board.Scalars("valid/auc")] == [(20, 0.75)]
    shown = capsys.readouterr().err
    assert "epoch 1  step 10  loss 0.5000  12,346 samples/s  waiting for data 25.0%\n" in shown
    assert "epoch 2  step 20  validation auc 0.7500 gauc -" in shown


def test_the_board_has_the_config_as_hyperparameters(tmp_path: Path) -> None:
    with begun(tmp_path, seed=7):
        pass
    summaries = board_of(tmp_path).SummaryMetadata
    begin = HParamsPluginData.FromString(
        summaries("_hparams_/session_start_info").plugin_data.content
    ).session_start_info
    assert begin.hparams["run.seed"].number_value == 7
    assert begin.hparams["outer.dense_lr"].number_value == 0.001
    assert begin.hparams["model.hidden"].string_value.startswith("[")
    told = HParamsPluginData.FromString(summaries("_hparams_/experiment").plugin_data.content)
    names = [info.name.tag for info in told.experiment.metric_infos]
    assert names == ["loss", "valid/auc"]


@pytest.mark.parametrize(
    ("verbosity", "shown"), [(QUIET, ""), ("", "loss 0.5000\n"), (VERBOSE, "dense lr 0.0010\n")]
)
def test_how_much_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    verbosity: str, shown: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(VERBOSITY_VARIABLE, verbosity)
    with begun(tmp_path, loggers=()) as (hooks, _):
        hooks.show_lines(["as it is" if verbosity else ""])
        hooks.log(10, 0, {"loss": 0.5, "dense_lr": 0.001})
    assert capsys.readouterr().err.endswith(shown)
    assert (capsys.readouterr().err == "") or verbosity != QUIET


def test_without_loggers_there_is_still_metrics_jsonl(tmp_path: Path) -> None:
    with begun(tmp_path, loggers=()) as (hooks, _):
        hooks.log(1, 0, READING)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_goes_on_in_its_file_and_drops_points_beyond_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    for done_steps, loss in ((0, 0.5), (10, 0.4)):
        # TensorBoard reads files in the order of their names, which within one second is chance.
        began_s = time.time() + done_steps
        later = SimpleNamespace(time=lambda at_s=began_s: at_s)
        monkeypatch.setattr(event_file_writer, "time", later)
        with begun(folder, total_steps=40, done_steps=done_steps) as (hooks, _):
            for step in range(done_steps + 10, 40, 10):
                hooks.log(step, 0, {"loss": loss})
    lines = RunFolder(folder).metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 30, 20, 30]
    points = [(point.step, round(point.value, 4)) for point in board_of(folder).Scalars("loss")]
    assert points == [(10, 0.5), (20, 0.4), (30, 0.4)]


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = RunHooks(TrainConfig(run=RunConfig(dir=str(tmp_path))), of_rank(1, world_size=2))
    with hooks:
        hooks.show_lines(["nobody hears this"])
        hooks.log(1, 0, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_what_is_told_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with begun(tmp_path, loggers=()) as (hooks, _):
        hooks.show_lines(["table [bold] of /data/[x]"])
    assert "table [bold] of /data/[x]" in capsys.readouterr().err


@pytest.mark.parametrize("full_at_once", [True, False])
def test_a_full_disk_under_tensorboard_is_raised_without_a_traceback(
    full_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    logger = TensorBoard()

    def write_on() -> None:
        if full_at_once:
            monkeypatch.setattr(record_writer.RecordWriter, "write", full)
        with begun(tmp_path) as (hooks, _):
            monkeypatch.setattr(record_writer.RecordWriter, "write", full)
            while True:  # its thread fails; what writes next says so
                hooks.log(1, 0, {"loss": 0.5})
                time.sleep(0.01)

    with pytest.raises(OSError, match="No space left"):
        write_on()
    assert shown == []
    assert full_at_once or threading.excepthook == shown.append
    # What another thread dies of is shown.
    logger._excepthook = shown.append
    other = threading.ExceptHookArgs((ValueError, ValueError("x"), None, None))
    logger._hide_disk_errors(other)
    assert shown == [other]


def test_a_callback_and_a_logger_hear_of_everything_in_its_order(tmp_path: Path) -> None:
    named = {"loggers": (f"{HERE}:Recorder",), "callbacks": (f"{HERE}:Recorder",)}
    loss = torch.ones((), requires_grad=True)
    with begun(tmp_path, done_steps=4, **named) as (hooks, _):
        hooks.record_step(RunProgress(step=5, epoch=1), 2 * loss)
        hooks.log(5, 1, {"loss": 2.0})
        hooks.record_validation(5, 1, {"auc": 0.5})
        hooks.record_checkpoint(tmp_path / "step-5")
    calls = [(name, *rest) for name, *rest in Recorder.calls]
    assert [call[0] for call in calls] == [
        *("begin", "on_train_begin", "on_step_end", "log", "on_log", "log", "on_validation_end"),
        *("on_checkpoint", "on_train_end", "end"),
    ]
    info = calls[0][1]
    assert (info.folder, info.metric) == (tmp_path, "auc")
    assert (info.done_steps, info.total_steps) == (4, 20)
    run = calls[1][1]
    assert isinstance(run, Run)
    assert (run.step, run.epoch, run.rank, run.world_size) == (5, 1, 0, 1)
    assert calls[2][2].item() == 2.0
    assert not calls[2][2].requires_grad
    assert calls[3][1] == Reading(5, 1, {"loss": 2.0}) == calls[4][2]
    assert calls[5][1].scalars() == {"valid/auc": 0.5}
    assert calls[6][2] == {"auc": 0.5}
    assert calls[7][2] == tmp_path / "step-5"
    assert (calls[8][2], calls[9][1]) == ("finished", "finished")


def test_a_callback_that_stops_says_why_and_how_the_run_ended(tmp_path: Path) -> None:
    with begun(tmp_path, callbacks=(f"{HERE}:Recorder",)) as (_, stop):
        Recorder.calls[0][1].stop("patience")
        assert (stop.is_requested, stop.reason) == (True, "patience")
        stop.is_agreed = True  # as the steps do, behind which a checkpoint is written
    assert Recorder.calls[-1][0] == "on_train_end"
    assert Recorder.calls[-1][2] == "stopped"


@pytest.mark.parametrize(
    ("raised", "status"), [(StoppedError("x"), "stopped"), (GMetaError("x"), "failed")]
)
def test_a_logger_hears_how_the_run_ended(tmp_path: Path, raised: GMetaError, status: str) -> None:
    with (
        pytest.raises(type(raised)),
        begun(tmp_path, loggers=(f"{HERE}:Recorder",), callbacks=(f"{HERE}:Recorder",)),
    ):
        raise raised
    ends = [call for call in Recorder.calls if call[0] in ("end", "on_train_end")]
    assert ends[-1] == ("end", status)
    assert len(ends) == (1 if status == "failed" else 2)


def test_what_a_callback_raises_between_steps_asks_all_ranks_to_end(tmp_path: Path) -> None:
    Recorder.fails_in = ("on_step_end",)
    told = (
        f"the callback '{HERE}:Recorder' of run.callbacks failed behind step 5: ZeroDivisionError: "
        "of somebody's own. Mend it, or take it out; --resume goes on from the newest checkpoint"
    )

    def step_on() -> None:
        with begun(tmp_path, callbacks=(f"{HERE}:Recorder",)) as (hooks, stop):
            # This raises nothing: a collective is next.
            hooks.record_step(RunProgress(step=5), torch.zeros(()))
            assert stop.is_requested
            assert str(stop.problem) == told

    # Behind the last step nobody asks: it is raised at the end.
    assert catch_message(GMetaError, step_on) == told
    assert "on_train_end" not in [call[0] for call in Recorder.calls]


def test_a_logger_of_somebodys_own_that_fails_is_told_of_once_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder.fails_in = ("log",)
    with begun(tmp_path, loggers=(f"{HERE}:Recorder",)) as (hooks, _):
        hooks.log(1, 0, READING)
        hooks.log(2, 0, READING)
    assert [call[0] for call in Recorder.calls] == ["begin", "log"]
    assert (
        capsys.readouterr().err.count(
            f"the logger '{HERE}:Recorder' failed and is left out from here on: ZeroDivisionError: "
            "of somebody's own"
        )
        == 1
    )
    assert len(RunFolder(tmp_path).metrics.read_text().splitlines()) == 2


@pytest.mark.parametrize("silent_in", ["log", "end"])
def test_a_logger_that_does_not_answer_is_told_of_once_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], silent: type[Silent], silent_in: str
) -> None:
    silent.silent_in = silent_in
    named = (f"{HERE}:Silent", "tensorboard")
    with begun(tmp_path, loggers=named, collective_timeout_s=6) as (hooks, _):
        hooks.log(1, 0, READING)
        hooks.log(2, 0, READING)
    found = silent.calls
    assert found == {"log": ["begin", "log"], "end": ["begin", "log", "log", "end"]}[silent_in]
    told = (
        f"the logger '{HERE}:Silent' failed and is left out from here on: NoAnswerError: none "
        "within 3 s"
    )
    assert capsys.readouterr().err.count(told) == 1
    assert len(board_of(tmp_path).Scalars("loss")) == 2


def test_a_logger_that_does_not_answer_at_the_start_ends_the_run_with_one_line(
    tmp_path: Path, silent: type[Silent]
) -> None:
    silent.silent_in = "begin"
    named = {"loggers": (f"{HERE}:Silent",), "collective_timeout_s": 6}
    with pytest.raises(GMetaError) as caught, begun(tmp_path, **named):
        pass
    assert str(caught.value) == (
        f"the logger '{HERE}:Silent' of run.loggers did not begin: NoAnswerError: none within 3 s. "
        "Mend it, or take it out of run.loggers"
    )
    assert silent.calls == ["begin"]


def test_a_logger_is_called_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(
        Silent, "_called", lambda self, what: threads.append((what, threading.get_ident()))
    )
    with begun(tmp_path, loggers=(f"{HERE}:Silent",)) as (hooks, _):
        hooks.log(1, 0, READING)
    assert [what for what, _ in threads] == ["begin", "log", "end"]
    assert len({ident for _, ident in threads}) == 1


def test_one_that_cannot_begin_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    Recorder.fails_in = ("begin",)
    with pytest.raises(GMetaError) as caught, begun(tmp_path, loggers=(f"{HERE}:Recorder",)):
        pass
    assert str(caught.value) == (
        f"the logger '{HERE}:Recorder' of run.loggers did not begin: ZeroDivisionError: of "
        "somebody's own. Mend it, or take it out of run.loggers"
    )
    with pytest.raises(GMetaError) as caught, begun(tmp_path, callbacks=(f"{HERE}:Needy",)):
        pass
    assert str(caught.value) == (
        f"the callback '{HERE}:Needy' cannot be made: TypeError: Needy.__init__() missing 1 "
        "required positional argument: 'what'. A class that is made without arguments is needed "
        "(docs/extending.md)"
    )


def test_names_that_stand_for_nothing_are_refused_before_anything_is_made() -> None:
    for keys, told in (
        ({"loggers": ("wanb",)}, "run.loggers = 'wanb' is unknown: known are mlflow, tensorboard"),
        (
            {"callbacks": (f"{HERE}:begun",)},
            "a subclass of gmeta.runs.logging.callback.Callback is n",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            RunHooks(TrainConfig(run=RunConfig(**keys)), of_rank(0))  # type: ignore[arg-type]
