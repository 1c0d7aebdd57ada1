"""Ranks that are forked from one process: killed, started again, and what they leave."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gmeta.runs.run_folder import list_checkpoints
from tests.antdt.faults.test_training_job import descendants
from tests.support.commands import SMALL_MODEL, environment, metrics, write_config
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent"
)


@contextmanager
def training(folder: Path, data: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A launcher of two ranks, as a user starts it."""
    config = write_config(folder / "t.toml", data, folder / "run")
    command = [sys.executable, "-m", "gmeta", "train", str(config), *SMALL_MODEL]
    command += ["run.checkpoint_every_steps=4", "run.loggers=[]", "--nproc-per-node=2", *arguments]
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, text=True)
    try:
        yield launcher
    finally:
        for pid in (launcher.pid, *descendants(launcher.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def wait_for_checkpoint(run: Path) -> None:
    """Longer than elsewhere: nothing is imported beforehand."""
    patience_s = 4 * PATIENCE_S
    wait_until(lambda: list_checkpoints(run / "checkpoints"), "a checkpoint", 0.05, patience_s)


def ranks_of(launcher: "subprocess.Popen[str]") -> list[int]:
    """The processes of their own sessions: ranks."""
    return [pid for pid in descendants(launcher.pid) if os.getsid(pid) == pid]


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_a_killed_rank_is_started_again_without_imports_and_the_run_ends(
    tmp_path: Path, click_logs: Path
) -> None:
    steps = ["run.max_steps=24", "run.epochs=10", "--max-restarts=1"]
    with training(tmp_path, click_logs, *steps) as launcher:
        wait_for_checkpoint(tmp_path / "run")
        first, _ = before = ranks_of(launcher)
        (server,) = {Path(f"/proc/{pid}/stat").read_text().split()[3] for pid in before}
        os.kill(first, signal.SIGKILL)
        assert launcher.wait(4 * PATIENCE_S) == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert "restart 1 of 1" in said
    assert server != str(launcher.pid)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 25))


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_ranks_end_with_a_checkpoint_once_their_launcher_is_killed(
    tmp_path: Path, click_logs: Path
) -> None:
    with training(tmp_path, click_logs, "run.max_steps=0", "run.epochs=10000") as launcher:
        wait_for_checkpoint(tmp_path / "run")
        ranks = ranks_of(launcher)
        launcher.kill()
        wait_until(lambda: not any(map(is_alive, ranks)), "the end of the ranks")
    newest = list_checkpoints(tmp_path / "run/checkpoints")[-1]
    assert int(newest.name.removeprefix("step-")) == metrics(tmp_path / "run")[-1]["step"]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
