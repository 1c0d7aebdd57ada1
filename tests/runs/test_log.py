"""What a run tells while it trains: readings, where they go, and who is silent."""

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer, record_writer

from gmeta.runs import log as run_log
from gmeta.runs.folder import RunFolder
from gmeta.runs.log import RunLog, StepMeter


def of_rank(rank: int, world_size: int = 1) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass when a test says so."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(run_log, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def both_alike(values: list[float], ranks: Any) -> list[float]:
    return [ranks.world_size * value for value in values]


def test_a_reading_is_the_mean_of_the_steps_since_the_last(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(run_log, "sum_over_ranks", both_alike)
    meter = StepMeter(of_rank(0, world_size=2))
    for loss, num_rows in ((1.0, 30), (2.0, 50)):
        meter.add(torch.tensor(loss), num_rows)
    clock.s += 4.0
    assert meter.steps == 2
    assert meter.read(wait_s=1.0) == {"loss": 1.5, "samples_per_s": 20.0, "data_wait_share": 0.25}
    meter.add(torch.tensor(5.0), 10)
    clock.s += 1.0
    # The wait is a running total: what the first reading had is not counted again.
    assert meter.read(wait_s=1.5) == {"loss": 5.0, "samples_per_s": 10.0, "data_wait_share": 0.5}
    assert meter.steps == 0


def test_a_step_that_shows_no_loss_is_not_one_of_loss_0(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(run_log, "sum_over_ranks", both_alike)
    meter = StepMeter(of_rank(0))
    # Three quarters of the first step's terms have a value, none of the second's.
    for loss, terms_per_shown in ((0.75, 4 / 3), (0.0, 0.0), (2.0, 1.0)):
        meter.add(torch.tensor(loss), 10, terms_per_shown)
    clock.s += 1.0
    assert meter.steps == 3
    assert meter.read(wait_s=0.0) == {"loss": 1.5, "samples_per_s": 30.0, "data_wait_share": 0.0}
    meter.add(torch.tensor(0.0), 10, 0.0)
    clock.s += 1.0
    assert meter.read(wait_s=0.0) == {"loss": None, "samples_per_s": 10.0, "data_wait_share": 0.0}


def test_what_is_done_between_steps_makes_them_no_slower(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(run_log, "sum_over_ranks", both_alike)
    meter = StepMeter(of_rank(0))
    with meter.paused():  # before the first step too
        clock.s += 50.0
    for _ in range(2):
        clock.s += 1.0
        meter.add(torch.tensor(1.0), 10)
        with meter.paused():
            clock.s += 100.0
    assert meter.read(wait_s=0.5) == {"loss": 1.0, "samples_per_s": 10.0, "data_wait_share": 0.25}


def test_a_loss_that_is_read_keeps_no_graph() -> None:
    meter = StepMeter(of_rank(0))
    weight = torch.ones((), requires_grad=True)
    meter.add(2 * weight, 1)
    assert not meter._loss.requires_grad


def folder_of(path: Path) -> RunFolder:
    path.mkdir()
    return RunFolder(path)


def test_readings_are_json_lines_and_scalars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # lines are not cut: who greps a log finds whole readings
    folder = folder_of(tmp_path / "run")
    values = {"loss": 0.5, "samples_per_s": 12345.6, "data_wait_share": 0.25}
    scores = {"valid": {"auc": 0.75, "gauc": None}}
    with RunLog(folder, of_rank(0), total_steps=20, done_steps=0) as log:
        log.write(10, 0, values)
        log.write(20, 1, scores)
    first, second = (json.loads(line) for line in folder.metrics.read_text().splitlines())
    assert first == {"step": 10, "epoch": 0, **values}
    assert second == {"step": 20, "epoch": 1, **scores}
    board = EventAccumulator(str(folder.tensorboard)).Reload()
    assert sorted(board.Tags()["scalars"]) == [
        "data_wait_share",
        "loss",
        "samples_per_s",
        "valid/auc",  # gauc is undefined: no point, instead of a zero
    ]
    assert [(point.step, point.value) for point in board.Scalars("valid/auc")] == [(20, 0.75)]
    shown = capsys.readouterr().err
    assert "epoch 1  step 10  loss 0.5000  samples_per_s 12,346  data_wait_share 25.0%" in shown
    assert "epoch 2  step 20  valid auc 0.7500 gauc -" in shown


def test_a_resumed_run_goes_on_in_its_file_and_drops_points_beyond_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "run")
    for done_steps, loss in ((0, 0.5), (10, 0.4)):
        # TensorBoard reads files in the order of their names, which within one second is chance.
        began_s = time.time() + done_steps
        later = SimpleNamespace(time=lambda at_s=began_s: at_s)
        monkeypatch.setattr(event_file_writer, "time", later)
        with RunLog(folder, of_rank(0), total_steps=40, done_steps=done_steps) as log:
            for step in range(done_steps + 10, 40, 10):
                log.write(step, 0, {"loss": loss})
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == [10, 20, 30, 20, 30]
    board = EventAccumulator(str(folder.tensorboard)).Reload()
    points = [(point.step, round(point.value, 4)) for point in board.Scalars("loss")]
    assert points == [(10, 0.5), (20, 0.4), (30, 0.4)]


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "run")
    with RunLog(folder, of_rank(1, world_size=2), total_steps=1, done_steps=0) as log:
        log.tell(["nobody hears this"])
        log.write(1, 0, {"loss": 1.0})
    assert list(folder.root.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_what_is_told_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with RunLog(folder_of(tmp_path / "run"), of_rank(0), total_steps=1, done_steps=0) as log:
        log.tell(["table [bold] of /data/[x]"])
    assert "table [bold] of /data/[x]" in capsys.readouterr().err


def test_a_full_disk_under_tensorboard_is_raised_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    log = RunLog(RunFolder(tmp_path), of_rank(0), total_steps=9, done_steps=0)

    def write_on() -> None:
        with log:
            monkeypatch.setattr(record_writer.RecordWriter, "write", full)
            while True:  # its thread fails; what writes next says so
                log.write(1, 0, {"loss": 0.5})
                time.sleep(0.01)

    with pytest.raises(OSError, match="No space left"):
        write_on()
    assert shown == []
    assert threading.excepthook == shown.append
    # What another thread dies of is shown.
    other = threading.ExceptHookArgs((ValueError, ValueError("x"), None, None))
    log._unless_told(other)
    assert shown == [other]
