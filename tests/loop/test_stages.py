"""A stage in a process of its own, and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gmeta.commands import follow
from gmeta.loop import stages
from tests.forked import Forked
from tests.loop.days import write_loop
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    stages._ending.clear()
    stages._dismiss()


def test_a_stage_that_sigterm_comes_before_is_ended_at_once(tmp_path: Path) -> None:
    stages.end_stage()
    assert stages.run_stage(["--version"], tmp_path / "log") == -signal.SIGTERM


def test_a_signal_in_the_middle_of_a_wait_ends_the_loop_too(tmp_path: Path) -> None:
    """A handler that takes the lock of the wait that it interrupts would hang for ever."""
    forked = Forked(follow_interrupted, write_loop(tmp_path))
    try:
        assert forked.wait(PATIENCE_S) == 0
    finally:
        if forked.poll() is None:
            os.kill(forked.pid, signal.SIGKILL)


def follow_interrupted(config: Path) -> None:
    waits = (threading.Event.wait.__code__, follow._pause.__code__)
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        asked_by = frame.f_back and frame.f_back.f_code
        if frame.f_code in waits and asked_by is follow._run.__code__ and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == 2:  # an event would hold its lock now
                signal.raise_signal(signal.SIGTERM)
        return trace

    sys.settrace(trace)
    follow.follow(config)
    sys.settrace(None)
    os._exit(0 if len(lines) > 1 else 9)
