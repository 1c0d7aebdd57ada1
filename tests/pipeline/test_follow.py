"""`gmeta follow` as a user starts it: killed, without room on its disk, by a clock that jumps, it
comes to what it would have come to. FOLLOW_KILLS=2000 and FOLLOW_TROUBLES=200 try so many."""

import errno
import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from gmeta.pipeline.stage_outcome import FROZEN_FILE
from gmeta.serving.channel.version_cache import CACHE_VARIABLE
from tests.pipeline.days import write_loop
from tests.pipeline.kills import fail_while
from tests.pipeline.test_loop import outcome
from tests.support.commands import environment
from tests.support.forked import ForkedProcess, Task, forked
from tests.support.waiting import PATIENCE_S, wait_until

KILLS = int(os.environ.get("FOLLOW_KILLS", "4"))
TROUBLES = int(os.environ.get("FOLLOW_TROUBLES", "3"))
FEW = (1, 2, 3, 5, 8, 13, 21)  # changes
JUMPS_S = (86_400, -3_600)


@pytest.mark.distributed
def test_killed_anywhere_it_loses_and_doubles_nothing(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with -9 at a random change of the files; another begins at once, while the stage of
    the killed one may still be at its end."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    drawn = random.Random(os.environ.get("FOLLOW_SEED", "0"))
    left, number = KILLS, 0
    while left or not number:
        root, number = another_loop(followed, tmp_path, number), number + 1
        task = Task("gmeta", ("follow", str(root / "stream.toml")), environment(), tmp_path)
        while left and not last_of(root).exists():
            with forked(task) as running:
                after_changes(running, root, drawn.choice(FEW))
                os.kill(running.pid, signal.SIGKILL)
                assert running.wait(PATIENCE_S) == -signal.SIGKILL
                left -= 1
        with forked(task) as running:
            check_its_end(running, root, followed)


@pytest.mark.distributed
def test_it_goes_on_once_files_can_be_made_again_and_the_clock_is_right(
    followed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full or fails from a random change on, until so many files were not made."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    drawn = random.Random(os.environ.get("FOLLOW_SEED", "0"))
    flag, notes = tmp_path / "flag", tmp_path / "notes"
    notes.touch()
    left, number = TROUBLES, 0
    while left or not number:
        root, number = another_loop(followed, tmp_path, number), number + 1
        first = partial(fail_while, str(flag), str(root), str(notes))
        command = ("follow", str(root / "stream.toml"))
        task = Task("gmeta", command, environment(), tmp_path, first=first)
        with forked(task) as running:
            while left and not last_of(root).exists():
                after_changes(running, root, drawn.choice(FEW))
                enough = notes.stat().st_size + drawn.choice((1, 4))
                new = tmp_path / "new"
                error, jump_s = drawn.choice((errno.ENOSPC, errno.EIO)), drawn.choice(JUMPS_S)
                new.write_text(f"{error} {jump_s}")
                new.rename(flag)
                wait_until(partial(has_failed, notes, enough, root), "a failure")
                flag.unlink()
                left -= 1
            check_its_end(running, root, followed)
    assert "waiting: " in running.stdout


def another_loop(followed: Path, place: Path, number: int) -> Path:
    """A loop on the same log, which must come to the same."""
    root = place / f"loop-{number}"
    root.mkdir()
    config = write_loop(root, margin=9)
    # The stream knows its files by their names, and is the same only if they have the same.
    config.write_text(config.read_text().replace(f"{root}/logs", f"{followed}/logs"))
    return root


def last_of(root: Path) -> Path:
    """What the last stage writes."""
    return root / "runs" / "000002" / FROZEN_FILE


def has_failed(notes: Path, enough: int, root: Path) -> bool:
    return notes.stat().st_size >= enough or last_of(root).exists()


def check_its_end(running: ForkedProcess, root: Path, followed: Path) -> None:
    """It runs its last stage, ends by SIGTERM and has come to what an undisturbed one comes to."""
    wait_until(last_of(root).exists, "the last stage")
    os.kill(running.pid, signal.SIGTERM)
    # By the signal itself where the loop has only just begun, with nothing left to do.
    assert running.wait(PATIENCE_S) in (0, -signal.SIGTERM), running.stderr
    assert outcome(root) == outcome(followed)
    # The last stage may be at its end when SIGTERM comes.
    own = ("increment ", "waiting: ", "stopped: score of increment 2 ")
    assert [one for one in running.stdout.splitlines() if not one.startswith(own)] == []
    assert running.stderr == ""


def after_changes(running: ForkedProcess, root: Path, count: int) -> None:
    """Returns once the files below `root` have changed so often, or the last of them is there."""
    seen, left = files_of(root), count

    def reached() -> bool:
        nonlocal seen, left
        assert running.poll() is None, running.stderr
        now = files_of(root)
        left, seen = left - (now != seen), now
        return left == 0 or last_of(root).exists()

    wait_until(reached, "the stage", pause_s=0.001)


def files_of(root: Path) -> frozenset[str]:
    return frozenset(path for path, _, _ in os.walk(root)) | frozenset(
        f"{path}/{name}" for path, _, names in os.walk(root) for name in names
    )
