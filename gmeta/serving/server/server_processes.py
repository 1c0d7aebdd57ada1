"""The processes of one server: itself, or several workers, started again when one dies."""

import logging
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

import numpy  # noqa: F401  # torch would import it in C, and swallow a Ctrl-C meanwhile
import torch
from prometheus_client.multiprocess import mark_process_dead

from gmeta.access.address import check_free, split_address
from gmeta.access.log import configure_logging, event
from gmeta.errors import GMetaError
from gmeta.serving.channel.load_failure import RETRY_S
from gmeta.serving.server.serve_config import ServeConfig
from gmeta.serving.server.server_metrics import MULTIPROCESS_DIR
from gmeta.serving.server.version_loader import model_folder
from gmeta_keys.stop_flag import StopFlag, stop_signals
from metaio.format.atomic_folder import open_temporary_folder

_LOOK_EVERY_S = 0.2
_RESTART_AFTER_S = 1.0  # twice as long with each start that fails, up to RETRY_S
_IN_MEMORY = Path("/dev/shm")
_AFTER_DRAIN_S = 15.0  # then a worker is killed
_MOST_SILENT_LOOKS = 75  # at a worker that serves, or 15 s: then it hangs, and is killed


RunWorker = Callable[[ServeConfig, Callable[[int], None]], None]


def serve_until_signal(
    config: ServeConfig, log_level: str, run_worker: RunWorker, announce: Callable[[int], None]
) -> int:
    """Serve by `run_worker` until a signal, then answer what is under way; return the exit code.
    `announce` is called once with the port, when the first worker serves."""
    announce = cache(announce)  # every worker tells its port each second
    if config.workers == 1:
        configure_logging(log_level)
        run_worker(config, announce)
        return 0
    # A process forked from one whose torch has threads waits for them for ever.
    torch.set_num_threads(1)
    # Checked once and reported once, whatever the number of workers.
    model_folder(config.folder, config.verify)
    for option, address in config.addresses.items():
        check_free(option, *split_address(option, address))
    configure_logging(log_level)
    with _folder_in_memory() as temporary:
        folder = Path(temporary)
        os.environ[MULTIPROCESS_DIR] = str(folder / "metrics")
        (folder / "metrics").mkdir()
        config = replace(config, shared_file=folder / "support.db")
        return _WorkerGroup(config, run_worker, announce).run()


def _folder_in_memory() -> AbstractContextManager[str]:
    """Return a folder of this process alone, in memory where the system has such a place."""
    # The workers inherit its lock: it is not taken for a dead process's folder while one lives.
    place = str(_IN_MEMORY) if os.access(_IN_MEMORY, os.W_OK) else None
    return open_temporary_folder("gmeta-serving-", place)


@dataclass
class _WorkerProcess:
    process: BaseProcess
    sign: Connection  # its port comes each second once it serves
    pause_s: float = 0.0  # before its start or, once it has died, the next one's; 0: the first
    serves: bool = False
    # Not seconds: while this process itself is stopped, nobody is silent.
    silent_looks: int = 0
    again_at_s: float | None = None  # once it has died: when another takes its place


@final
class _WorkerGroup:
    def __init__(
        self, config: ServeConfig, run_worker: RunWorker, announce: Callable[[int], None]
    ) -> None:
        self._config = config
        self._run_worker = run_worker
        self._announce = announce
        # Forked: they share what is imported. This process has one thread, now and later.
        self._context = mp.get_context("fork")
        self._stop_flag = StopFlag()
        # Nothing is ever sent: its end tells the workers that this process has died.
        self._workers_side, self._own_side = self._context.Pipe(duplex=False)

    def run(self) -> int:
        """Keep the workers running until a signal; return the exit code."""
        for number in stop_signals():
            signal.signal(number, self._stop_flag.stop)
        workers = [self._start() for _ in range(self._config.workers)]
        code = 0
        while not code and not self._stop_flag.wait(_LOOK_EVERY_S):
            # Not 0: a worker could not start the first time, as with a wrong config.
            code = self._restart_dead(workers)
        self._stop(workers)
        return code

    def _restart_dead(self, workers: list[_WorkerProcess]) -> int:
        """Start each dead worker again; return the exit code of one that could never start."""
        for place, worker in enumerate(workers):
            worker.silent_looks += worker.serves
            with suppress(EOFError):  # it has ended
                while worker.sign.poll():
                    self._announce(worker.sign.recv())
                    worker.serves, worker.silent_looks = True, 0
            if worker.process.is_alive():
                if worker.silent_looks <= _MOST_SILENT_LOOKS:
                    continue
                event(logging.ERROR, "worker_hangs", pid=worker.process.pid)
                worker.process.kill()
                worker.process.join()
            if worker.again_at_s is None:
                # It no longer counts in gauges of the present.
                mark_process_dead(worker.process.pid or 0)
                # One that served may have died with its disk, which comes back; others serve on.
                if not worker.serves and not worker.pause_s:
                    return worker.process.exitcode or 1
                doubled_s = min(2 * worker.pause_s, RETRY_S)
                worker.pause_s = _RESTART_AFTER_S if worker.serves else doubled_s
                worker.again_at_s = time.monotonic() + worker.pause_s
                code = worker.process.exitcode
                event(logging.ERROR, "worker_died", code=code, again_in_s=worker.pause_s)
            if time.monotonic() >= worker.again_at_s:
                workers[place] = self._start(worker.pause_s)
        return 0

    def _start(self, pause_s: float = 0.0) -> _WorkerProcess:
        sign, its_sign = self._context.Pipe(duplex=False)
        work, name = partial(self._work, its_sign), "gmeta-serve-worker"
        process = self._context.Process(target=work, name=name)
        # Signals are held back until the child has handlers of its own: with this process's, a
        # worker that is to end at once would serve on.
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
        # This process's copy: while it is open, the pipe does not end with the worker.
        its_sign.close()
        return _WorkerProcess(process, sign, pause_s)

    def _stop(self, workers: list[_WorkerProcess]) -> None:
        config = self._config
        for worker in workers:
            if worker.process.is_alive():
                worker.process.terminate()
        until_s = time.monotonic() + config.drain_s + config.drain_delay_s + _AFTER_DRAIN_S
        for worker in workers:
            worker.process.join(max(0.0, until_s - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _work(self, sign: Connection) -> None:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)  # until the worker has its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
        # The parent's end, inherited: open here, it would hide the parent's death.
        self._own_side.close()
        threading.Thread(target=_end_with, args=(self._workers_side,), daemon=True).start()
        try:
            os.set_blocking(sign.fileno(), False)
            self._run_worker(self._config, partial(_send_sign, sign))
        except GMetaError as error:
            event(logging.ERROR, "worker_not_started", message=str(error))
            os._exit(error.exit_code)


def _send_sign(sign: Connection, port: int) -> None:
    # A full pipe, or none: the process that reads it is stopped, or has died.
    with suppress(OSError):
        sign.send(port)


def _end_with(parent: Connection) -> None:
    """End this process by SIGTERM when the one at the other side of the pipe dies."""
    with suppress(EOFError):
        parent.recv()
    os.kill(os.getpid(), signal.SIGTERM)
