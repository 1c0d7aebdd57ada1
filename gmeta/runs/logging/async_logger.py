"""A logger on a thread of its own, which nobody waits for without end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import final

from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status
from gmeta_keys.translate_errors import translate_errors


class NoAnswerError(Exception):
    """A logger took too long."""


class _HandedOverError(Exception):
    """The error was handed to the waiting thread, which raises it."""


@final
class AsyncLogger(Logger):
    """Calls a logger on one thread, in order, and waits `patience_s` for each call: rank 0 waits,
    and all others for rank 0 in their next collective.

    After a NoAnswerError the logger is not to be called again: it may be at work still."""

    def __init__(self, logger: Logger, patience_s: float) -> None:
        self._logger, self._patience_s = logger, patience_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = (
            queue.SimpleQueue()
        )
        # A daemon: a logger that never answers must not keep the process from ending.
        threading.Thread(target=self._work, name="gmeta-logger", daemon=True).start()

    def begin(self, run: RunInfo) -> None:
        """Have the logger get ready. Raises NoAnswerError: it took too long."""
        self._call(lambda: self._logger.begin(run))

    def log(self, reading: Reading) -> None:
        """Have the logger write a reading down. Raises NoAnswerError: it took too long."""
        self._call(lambda: self._logger.log(reading))

    def end(self, status: Status) -> None:
        """Have the logger close what is open. Raises NoAnswerError: it took too long."""
        self._call(lambda: self._logger.end(status))

    def _call(self, work: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._calls.put((work, done))
        wait([done], self._patience_s)
        if not done.done():
            raise NoAnswerError(f"none within {self._patience_s:.0f} s")
        done.result()

    def _work(self) -> None:
        while True:
            work, done = self._calls.get()
            with suppress(_HandedOverError), translate_errors(partial(_hand_over, done)):
                work()
                done.set_result(None)


def _hand_over(done: Future[None], error: Exception) -> "_HandedOverError":
    """Hand an error to the waiting thread, and return the one to raise here in its place."""
    done.set_exception(error)
    return _HandedOverError()
