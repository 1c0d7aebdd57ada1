"""Processes that are forked from one with everything imported: trials, stages of `gmeta follow`."""

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from gmeta.errors import GMetaError
from gmeta_keys.stop_flag import StopFlag

END_TIMEOUT_S = 2.0  # of a server that closed its pipe: it is exiting


def forking_context(preload: Sequence[str]) -> ForkServerContext:
    """Return the context of processes that start with these modules imported."""
    context = multiprocessing.get_context("forkserver")
    # Importing fbgemm looks for a GPU. If torch looks by CUDA, and not by the driver's NVML, no
    # process that is forked after that can use one.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # First the modules that quieten the others, switch off garbage collection, and see to signals.
    context.set_forkserver_preload(
        [
            *(f"gmeta.platform.{one}" for one in ("verbosity", "no_garbage", "hear_sigterm")),
            *preload,
        ]
    )
    # Processes inherit the server's mask, which also prevents tracebacks from its own imports.
    resource_tracker.ensure_running()  # first, as starting it unblocks SIGINT
    # Ctrl-C goes to all processes of a terminal. It is for the process that started these, which
    # ends them: they must not get it too. Process 1 of a pod sends SIGTERM to all of a group: a
    # server that ended by it would have its processes count as ended while they still save.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with _explain_failure():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if multiprocessing.parent_process() is None:  # else the folder may be that of the parent
        _folders[os.getpid()] = util.get_temp_dir()
    return context


def server_pid() -> int:
    """Return the process that others are forked from, after `forking_context`."""
    server: Any = forkserver
    pid: int = server._forkserver._forkserver_pid
    return pid


def let_server_end() -> None:
    """In a forked process: let the server end with the process that started it, however that
    ends, and not only with this one."""
    server: Any = forkserver
    os.close(server._forkserver._forkserver_alive_fd)
    server._forkserver._forkserver_alive_fd = None


_folders: dict[int, str] = {}  # of the server's socket, by the process that asked for it


def remove_folder() -> None:
    """Remove the folder of the server's socket."""
    # For a process that ends without Python's own clean-up at exit.
    shutil.rmtree(_folders.pop(os.getpid(), ""), ignore_errors=True)


def start(process: BaseProcess) -> None:
    """Start a process of `forking_context`; end it and raise KeyboardInterrupt after Ctrl-C. Raises
    GMetaError: the server cannot fork it."""
    # Cut off in the middle, a start leaves a process that dies by a traceback, or that nobody ends.
    with _hold_interrupt() as is_heard, _explain_failure():
        process.start()
    if is_heard:
        process.terminate()
        raise KeyboardInterrupt


@contextmanager
def _explain_failure() -> Iterator[None]:
    """Raise GMetaError for what multiprocessing raises where the server does not run."""
    try:
        yield
    # The pipe that only ends, "Connection refused" and a socket that is gone tell no cause.
    except (EOFError, OSError) as error:
        if ended := _wait_for_end():
            how = f"ended with exit code {ended.si_status}: mend what it wrote above"
            if ended.si_code != os.CLD_EXITED:
                name = signal.Signals(ended.si_status).name
                how = f"was ended by {name}: if memory ran out, run less at a time"
            raise GMetaError(
                f"the process that others are forked from {how}, then run the same command again"
            ) from error
        raise GMetaError(
            f"no process can be forked: {error}. Its socket lies below TMPDIR, "
            f"{tempfile.gettempdir()}: see whether that can be written, and is a short path"
        ) from error


def _wait_for_end() -> os.waitid_result | None:
    """Return how the server ended, which may be ending; None if it goes on."""
    until_s = time.monotonic() + END_TIMEOUT_S
    with suppress(ChildProcessError):
        while time.monotonic() < until_s:
            # Processes that it forked are its children. It is left to be reaped: multiprocessing
            # starts another server once it sees its end.
            if ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return ended
            time.sleep(0.02)
    return None


@contextmanager
def _hold_interrupt() -> Iterator[StopFlag]:
    """Hold a first Ctrl-C back in a `with` block; yield a flag that says whether it came."""
    is_heard = StopFlag()

    def hold(*_: object) -> None:
        if is_heard:
            # A second one comes through.
            raise KeyboardInterrupt
        is_heard.stop()

    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield is_heard  # no other thread is interrupted, nor a process that ignores Ctrl-C
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield is_heard
    finally:
        signal.signal(signal.SIGINT, before)
