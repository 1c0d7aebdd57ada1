"""Ending a run early without losing a step: SIGTERM asks one rank, all ranks stop before the same
step."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from gmeta.distributed.launch import has_agent
from gmeta.errors import GMetaError

PR_SET_PDEATHSIG = 1
AGENT_SERVES_VARIABLE = "GMETA_AGENT_SERVES"  # set: the job's shard service ends with its launcher


class StoppedError(GMetaError):
    """The run was asked to stop and has kept every step that was done. Ends like a process that
    SIGTERM ended, so that torchrun and Kubernetes know that the work is not finished."""

    exit_code = 128 + signal.SIGTERM


@dataclass
class Stop:
    """Whether this rank was asked to stop, and whether all ranks know that one was; `problem` is
    what asked this rank, or `reason` why a callback did, if not SIGTERM."""

    is_requested: bool = False
    is_agreed: bool = False
    problem: Exception | None = None
    reason: str = ""


def end_with_agent() -> None:
    """Have Linux end this rank once the agent of torchrun that started it is gone, however it
    ended. Its ranks would train on, where nobody sees them, and keep the run folder to themselves.

    By SIGTERM, which keeps every step; by SIGKILL where the shard service went with the agent:
    without it no checkpoint is written, and a rank would wait for it for minutes."""
    if sys.platform == "linux" and has_agent():
        number = signal.SIGKILL if AGENT_SERVES_VARIABLE in os.environ else signal.SIGTERM
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """Yield a Stop that SIGTERM asks, instead of ending the process; Kubernetes sends it before it
    takes a pod away. Outside the main thread, which alone may handle signals, SIGTERM stays as it
    is."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        # Nothing else: a handler may run between any two instructions of a step.
        stop.is_requested = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
