"""Ends a run early without losing a step: SIGTERM reaches one rank, all stop before one step."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from gmeta.distributed.forked_ranks import AGENT_PID_VARIABLE
from gmeta.distributed.launch import has_agent
from gmeta.errors import GMetaError

PR_SET_PDEATHSIG = 1
AGENT_SERVES_VARIABLE = "GMETA_AGENT_SERVES"  # set: the job's shard service ends with its launcher


class StoppedError(GMetaError):
    """The run was asked to stop and has kept every step."""

    # As a process that SIGTERM ended: torchrun and Kubernetes know that work is left.
    exit_code = 128 + signal.SIGTERM


@dataclass
class Stop:
    """Whether this rank was asked to stop, and whether all ranks know that one was; `problem` or a
    callback's `reason` asked, if not SIGTERM."""

    is_requested: bool = False
    is_agreed: bool = False
    problem: Exception | None = None
    reason: str = ""


def end_with_agent() -> None:
    """Have Linux end this rank once torchrun's agent, which started it, is gone."""
    # The ranks would train on unseen and hold the run folder. SIGTERM keeps every step; where the
    # shard service went with the agent, SIGKILL: a rank would wait for it for minutes.
    if sys.platform == "linux" and has_agent():
        number = signal.SIGKILL if AGENT_SERVES_VARIABLE in os.environ else signal.SIGTERM
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        # It may be gone already. The number is not for what this rank starts in its turn.
        parent = str(os.getppid())
        if os.environ.pop(AGENT_PID_VARIABLE, parent) != parent:
            os.kill(os.getpid(), number)


@contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """Yield a Stop that SIGTERM sets, instead of ending the process."""
    stop = Stop()
    # Kubernetes sends it before it takes a pod away. Only the main thread may handle signals.
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
