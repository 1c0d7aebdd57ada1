"""All that follows a run: screen and metrics.jsonl, the loggers and callbacks that its config
names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, final

from torch import Tensor

from gmeta.config.train_config import TrainConfig
from gmeta.distributed.collective_errors import run_on_all, run_on_first
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.stopping import Stop, StoppedError
from gmeta.errors import GMetaError
from gmeta.runs.early_stop import make_early_stop
from gmeta.runs.logging.async_logger import AsyncLogger
from gmeta.runs.logging.callback import Callback, Run
from gmeta.runs.logging.file_loggers import JsonLines, TensorBoard
from gmeta.runs.logging.hook_registry import find_hooks
from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status
from gmeta.runs.logging.progress_screen import ProgressScreen
from gmeta.runs.run_folder import METRICS_FILE
from gmeta.runs.run_progress import RunProgress
from gmeta_keys.translate_errors import format_foreign_error, translate_errors

SCREEN_NAME = "the screen"
Made = TypeVar("Made")


class _LoggerError(GMetaError):
    """A logger of a network, or of somebody's own, failed."""


@final
class RunHooks:
    """All ranks make one and call it in the same places; loggers are rank 0's alone."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        """Find what the config names; nothing is made or opened yet. Raises ConfigError: it names
        something that is not there."""
        self._named_loggers, self._named_callbacks = find_hooks(config.run)
        self._ranks = ranks
        self._timeout_s = config.run.collective_timeout_s
        metric = make_early_stop(config).metric
        self._info = RunInfo(Path(config.run.dir), config.to_json(), metric)
        self._screen = ProgressScreen() if ranks.rank == 0 else None
        self._loggers: dict[str, Logger] = {}  # that were begun, by name
        self._callbacks: dict[str, Callback] = {}
        self._stop = Stop()
        self._run = Run(self._info, ranks, self._stop)

    def __enter__(self) -> "RunHooks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        is_stopped = isinstance(error, StoppedError) or (kind is None and self._stop.is_agreed)
        status: Status = "stopped" if is_stopped else "finished" if kind is None else "failed"
        ended: Status = "failed"
        try:
            if status != "failed":
                # A callback may fail even now: the loggers then hear of a failed run.
                self._end_callbacks(status)
            ended = status
        finally:
            for name in list(self._loggers):
                self._call_logger(name, lambda logger: logger.end(ended))

    def begin(
        self,
        progress: RunProgress,
        total_steps: int,
        stop: Stop,
        also: Mapping[str, Logger] = MappingProxyType({}),
    ) -> None:
        """Open the loggers and those in `also`, which the config does not name, and tell the
        callbacks that training begins; they may ask `stop` from here on. Collective. Raises
        GMetaError: a logger or a callback failed."""
        self._info = replace(self._info, done_steps=progress.step, total_steps=total_steps)
        self._stop, self._run = stop, Run(self._info, self._ranks, stop)
        self._run.epoch = progress.epoch
        run_on_first(lambda: self._open_loggers(also), self._ranks)
        run_on_all(self._begin_callbacks, self._ranks)

    def show_lines(self, lines: Sequence[str]) -> None:
        """Show lines that belong to the run, not to a step."""
        if self._screen is not None:
            self._screen.show_lines(lines)

    def record_step(self, progress: RunProgress, loss: Tensor) -> None:
        """Take note of a step, with this rank's part of its loss."""
        self._run.step, self._run.epoch = progress.step, progress.epoch
        if self._callbacks:
            own = loss.detach()
            self._call_callbacks_or_stop(lambda each: each.on_step_end(self._run, own))

    def log(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write a reading wherever readings go."""
        reading = self._write_reading(Reading(step, epoch, values))
        self._call_callbacks_or_stop(lambda each: each.on_log(self._run, reading))

    def record_validation(self, step: int, epoch: int, scores: Mapping[str, float | None]) -> None:
        """Write the metrics of the validation split; all ranks know them."""
        self._write_reading(Reading(step, epoch, {"valid": scores}))
        self._call_callbacks_or_stop(lambda each: each.on_validation_end(self._run, scores))

    def record_checkpoint(self, checkpoint: Path) -> None:
        """Take note that a checkpoint is whole."""
        self._call_callbacks_or_stop(lambda each: each.on_checkpoint(self._run, checkpoint))

    def _write_reading(self, reading: Reading) -> Reading:
        """Write a reading to all loggers, and return it."""
        for name in list(self._loggers):
            self._call_logger(name, lambda logger: logger.log(reading))
        return reading

    def _open_loggers(self, also: Mapping[str, Logger]) -> None:
        assert self._screen is not None  # rank 0 has one
        made: dict[str, Logger] = {
            name: _make_hook("logger", name, kind) for name, kind in self._named_loggers.items()
        }
        # TensorBoard writes files here. All others together end before the other ranks give up.
        others = [name for name, logger in made.items() if not isinstance(logger, TensorBoard)]
        made |= {
            name: AsyncLogger(made[name], self._timeout_s / (1 + len(others))) for name in others
        }
        own = {SCREEN_NAME: self._screen, METRICS_FILE: JsonLines()}
        for name, logger in {**own, **also, **made}.items():
            did_not_begin = f"the logger {name!r} of run.loggers did not begin"
            with translate_errors(
                _make_error_translator(did_not_begin, "Mend it, or take it out of run.loggers"),
                GMetaError,
                OSError,
            ):
                logger.begin(self._info)
            self._loggers[name] = logger

    def _begin_callbacks(self) -> None:
        named = self._named_callbacks.items()
        self._callbacks = {name: _make_hook("callback", name, kind) for name, kind in named}
        self._call_callbacks(lambda each: each.on_train_begin(self._run))

    def _call_logger(self, name: str, work: Callable[[Logger], None]) -> None:
        """Do something with a logger. One that goes over a network, or is somebody's own, is
        reported and left out from here on if it fails or does not answer: hours of training must
        not end with it. A full disk ends the run, which could write no checkpoint either."""
        logger = self._loggers[name]
        if isinstance(logger, ProgressScreen | JsonLines | TensorBoard):
            return work(logger)
        try:
            with translate_errors(lambda error: _LoggerError(format_foreign_error(error))):
                work(logger)
        except _LoggerError as error:
            del self._loggers[name]
            self.show_lines([f"the logger {name!r} failed and is left out from here on: {error}"])

    def _call_callbacks(self, work: Callable[[Callback], None]) -> None:
        """Call each callback. Raise GMetaError for what one raised."""
        for name, callback in self._callbacks.items():
            what = f"the callback {name!r} of run.callbacks failed behind step {self._run.step}"
            remedy = "Mend it, or take it out; --resume goes on from the newest checkpoint"
            with translate_errors(_make_error_translator(what, remedy)):
                work(callback)

    def _call_callbacks_or_stop(self, work: Callable[[Callback], None]) -> None:
        """Call each callback between two steps: what one raises asks all ranks to end, for they are
        on their way into the next collective."""
        try:
            self._call_callbacks(work)
        except GMetaError as error:
            self._stop.problem, self._stop.is_requested = self._stop.problem or error, True

    def _end_callbacks(self, status: Status) -> None:
        """Tell the callbacks of the end, or raise what one raised after the last step.
        Collective."""

        def end() -> None:
            if self._stop.problem is not None:
                raise self._stop.problem
            self._call_callbacks(lambda each: each.on_train_end(self._run, status))

        run_on_all(end, self._ranks)


def _make_hook(what: str, name: str, kind: type[Made]) -> Made:
    """Return a logger or callback of its class. Raise GMetaError where it cannot be made without
    arguments."""
    remedy = "A class that is made without arguments is needed (docs/extending.md)"
    with translate_errors(_make_error_translator(f"the {what} {name!r} cannot be made", remedy)):
        return kind()


def _make_error_translator(what: str, remedy: str) -> Callable[[Exception], GMetaError]:
    """Return a function that turns what somebody's own code raised into a GMetaError."""
    return lambda error: GMetaError(f"{what}: {format_foreign_error(error)}. {remedy}")
