"""A stage in a process of its own, and SIGTERM."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gmeta.cli.commands import follow
from gmeta.pipeline import stage_process as stages
from gmeta_keys.stop_flag import StopFlag
from tests.pipeline.days import write_loop
from tests.support.full_disk import files_of_at_most
from tests.support.interrupted import exit_code_of, interrupted


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    stages._ending = StopFlag()
    stages._end_waiting()


def test_a_stage_that_sigterm_comes_before_is_ended_at_once(tmp_path: Path) -> None:
    stages.end_stage()
    assert stages.run_stage(["--version"], tmp_path / "log") == -signal.SIGTERM


def test_a_log_that_cannot_be_written_is_told_by_the_loop(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        stages.run_stage(["--version"], tmp_path)


def test_a_full_disk_is_told_and_no_reason_of_an_earlier_try(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: increment 7 is damaged\n")
    with files_of_at_most(log.stat().st_size), pytest.raises(OSError, match=f"'{log}'"):
        stages.run_stage(["--version"], log)
    assert stages.last_line(log) == "error: increment 7 is damaged"
    log.write_text(f"{log.read_text()}$ gmeta judge m\n")  # and there was no room for more
    assert stages.last_line(log) == "it said nothing, as where the disk of its log is full"


def test_a_stage_whose_log_cannot_be_opened_any_more_ends_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = stages._send_order((("--version",), str(tmp_path)))
    stage.process.join()
    assert (stage.process.exitcode, capfd.readouterr().err) == (1, "")


def test_a_signal_in_the_middle_of_a_wait_ends_the_loop_too(tmp_path: Path) -> None:
    assert exit_code_of(follow_interrupted, write_loop(tmp_path)) == 0


def follow_interrupted(config: Path) -> int:
    return interrupted(partial(follow.follow, config), follow._run_stages.__code__)
