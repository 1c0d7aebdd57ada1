"""Processes that are forked from one with everything imported: trials, stages of `gmeta follow`."""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from gmeta_keys.stop_flag import StopFlag


def forking_context(preload: Sequence[str]) -> ForkServerContext:
    """Return the context of processes that start with these modules imported."""
    context = multiprocessing.get_context("forkserver")
    # Importing fbgemm looks for a GPU. If torch looks by CUDA, and not by the driver's NVML, no
    # process that is forked after that can use one.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # First the modules that quieten the others and switch off garbage collection.
    context.set_forkserver_preload(
        ["gmeta.platform.verbosity", "gmeta.platform.no_garbage", *preload]
    )
    # Processes inherit the server's mask, which also prevents tracebacks from its own imports.
    resource_tracker.ensure_running()  # first, as starting it unblocks SIGINT
    # Ctrl-C goes to all processes of a terminal. It is for the process that started these, which
    # ends them: they must not get it too.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if multiprocessing.parent_process() is None:  # else the folder may be that of the parent
        _folders[os.getpid()] = util.get_temp_dir()
    return context


_folders: dict[int, str] = {}  # of the server's socket, by the process that asked for it


def remove_folder() -> None:
    """Remove the folder of the server's socket."""
    # For a process that ends without Python's own clean-up at exit.
    shutil.rmtree(_folders.pop(os.getpid(), ""), ignore_errors=True)


def start(process: BaseProcess) -> None:
    """Start a process of `forking_context`; end it and raise KeyboardInterrupt after Ctrl-C."""
    # Cut off in the middle, a start leaves a process that dies by a traceback, or that nobody ends.
    with _hold_interrupt() as is_heard:
        process.start()
    if is_heard:
        process.terminate()
        raise KeyboardInterrupt


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
