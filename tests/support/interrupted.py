"""SIGTERM in the middle of a wait: a handler that takes the wait's lock hangs for ever."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from gmeta_keys.stop_flag import StopFlag
from tests.support.forked import Forked
from tests.support.waiting import PATIENCE_S

_WAITS = (threading.Event.wait.__code__, StopFlag.wait.__code__)
NOT_INTERRUPTED = 9


def interrupted(run: Callable[[], int | None], waits_in: CodeType) -> int:
    """Return what `run` does when SIGTERM comes amid that code's first wait, if it has one."""
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        begun_by = frame.f_back and frame.f_back.f_code
        if frame.f_code in _WAITS and begun_by is waits_in and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == 2:  # an event holds its lock now
                signal.raise_signal(signal.SIGTERM)
        return trace

    sys.settrace(trace)
    code = run() or 0
    sys.settrace(None)
    return code if len(lines) > 1 else NOT_INTERRUPTED


def exit_code_of(become: Callable[..., int], *arguments: object) -> int:
    """Return a function's exit code in its own process. Raises subprocess.TimeoutExpired."""
    forked = Forked(_leave_with, become, arguments)
    try:
        return forked.wait(PATIENCE_S)
    finally:
        if forked.poll() is None:
            os.kill(forked.pid, signal.SIGKILL)


def _leave_with(become: Callable[..., int], arguments: tuple[object, ...]) -> None:
    os._exit(become(*arguments))
