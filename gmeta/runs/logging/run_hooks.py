"""Screen, metrics.jsonl, loggers and callbacks of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

from torch import Tensor

from gmeta.config.train_config import TrainConfig
from gmeta.distributed.collective_errors import run_on_all, run_on_first
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.stopping import Stop, StoppedError
from gmeta.errors import GMetaError
from gmeta.runs.early_stop import make_early_stop
from gmeta.runs.logging.async_logger import AsyncLogger
from gmeta.runs.logging.callback import Callback, Run
from gmeta.runs.logging.callback_state import format_callbacks, gather_logged, read_callbacks
from gmeta.runs.logging.file_loggers import JsonLines, TensorBoard
from gmeta.runs.logging.hook_registry import find_hooks
from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status
from gmeta.runs.logging.progress_screen import ProgressScreen
from gmeta.runs.logging.rank_metrics import LISTEN_VARIABLE, RankMetrics
from gmeta.runs.run_folder import METRICS_FILE
from gmeta.runs.run_progress import RunProgress
from gmeta_keys.translate_errors import format_foreign_error, translate_errors

if TYPE_CHECKING:  # for annotations: loggers start without what trains
    from gmeta.data.accumulate import MicroBatches
    from gmeta.data.episodes import Episodes
    from gmeta.distributed.optim.optimizers import OuterOptimizer
    from gmeta.learner import MetaLearner

SCREEN_NAME = "the screen"
Made = TypeVar("Made")


class Feed(Protocol):
    """Where a rank's batches come from: its loggers, and for how long it was waited for."""

    loggers: Mapping[str, Logger]

    @property
    def wait_s(self) -> float:
        """Return the seconds."""


class _LoggerError(GMetaError):
    """A logger of a network, or of another package, failed."""


@final
class RunHooks:
    """All ranks make one and call it in the same places; loggers are rank 0's alone."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        """Find the hooks of the config; none is made yet. Raises ConfigError: one is not there."""
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
        self._trained: tuple[MetaLearner, OuterOptimizer] | None = None
        self._resumed: Path | None = None
        self._metrics: RankMetrics | None = None

    def __enter__(self) -> RunHooks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # A run that a callback stopped raises nothing.
        is_stopped = isinstance(error, StoppedError) or (kind is None and self._stop.is_agreed)
        status: Status = "stopped" if is_stopped else "finished" if kind is None else "failed"
        ended: Status = "failed"
        try:
            if status != "failed":
                # A callback may fail even now: the loggers then hear of a failed run.
                self._end_callbacks(status)
            ended = status
        finally:
            if self._metrics is not None:
                self._metrics.stop()
            for name in list(self._loggers):
                self._call_logger(name, lambda logger: logger.end(ended))

    def show_trained(
        self, learner: MetaLearner, optimizer: OuterOptimizer, resumed: Path | None
    ) -> None:
        """Let callbacks see what the run trains, and change it; if `resumed`, with what that
        checkpoint keeps of them."""
        self._trained, self._resumed = (learner, optimizer), resumed

    def begin(
        self, progress: RunProgress, total_steps: int, stop: Stop, feed: Feed | None = None
    ) -> None:
        """Open the loggers, the feed's own too, and begin the callbacks, which may set `stop` from
        here on. Collective. Raises GMetaError: one failed."""
        self._info = replace(self._info, done_steps=progress.step, total_steps=total_steps)
        self._stop, self._run = stop, Run(self._info, self._ranks, stop)
        self._run.epoch = progress.epoch
        if self._trained is not None:
            self._run.learner, self._run.optimizer = self._trained
        run_on_all(lambda: self._serve_metrics(feed), self._ranks)
        run_on_first(lambda: self._open_loggers(feed.loggers if feed else {}), self._ranks)
        run_on_all(self._begin_callbacks, self._ranks)

    def show_lines(self, lines: Sequence[str]) -> None:
        """Print lines that belong to the run, not to a step."""
        if self._screen is not None:
            self._screen.show_lines(lines)

    def record_gradients(self, batch: Episodes | MicroBatches, loss: Tensor) -> None:
        """Record that a step's gradients are there."""
        if self._callbacks:
            own = loss.detach()
            self._call_callbacks_or_stop(lambda each: each.on_backward(self._run, batch, own))

    def record_step(self, progress: RunProgress, loss: Tensor, num_rows: int = 0) -> None:
        """Record a step, with this rank's part of its loss and its rows."""
        self._run.step, self._run.epoch = progress.step, progress.epoch
        if self._metrics is not None:
            self._metrics.count_step(progress.step, num_rows)
        if self._callbacks:
            own = loss.detach()
            self._call_callbacks_or_stop(lambda each: each.on_step_end(self._run, own))

    def log(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write a reading, and what callbacks logged since the last, to all loggers. Collective."""
        if self._callbacks:
            values = {**values, **gather_logged(self._run, values, self._ranks)}
        if self._metrics is not None:
            self._metrics.show(values)
        reading = self._write_reading(Reading(step, epoch, values))
        self._call_callbacks_or_stop(lambda each: each.on_log(self._run, reading))

    def record_validation(self, step: int, epoch: int, scores: Mapping[str, float | None]) -> None:
        """Write the metrics of the validation split; all ranks know them."""
        if self._metrics is not None:
            self._metrics.show_scores(scores)
        self._write_reading(Reading(step, epoch, {"valid": scores}))
        self._call_callbacks_or_stop(lambda each: each.on_validation_end(self._run, scores))

    def record_checkpoint(self, checkpoint: Path) -> None:
        """Record that a checkpoint is whole."""
        if self._metrics is not None:
            self._metrics.note_checkpoint()
        self._call_callbacks_or_stop(lambda each: each.on_checkpoint(self._run, checkpoint))

    def _write_reading(self, reading: Reading) -> Reading:
        for name in list(self._loggers):
            self._call_logger(name, lambda logger: logger.log(reading))
        return reading

    def _serve_metrics(self, feed: Feed | None) -> None:
        if os.environ.get(LISTEN_VARIABLE):
            wait_s = (lambda: 0.0) if feed is None else (lambda: feed.wait_s)
            self._metrics = RankMetrics(self._info, self._ranks, wait_s)
            self._metrics.listen()

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
            # Those that did not begin are not ended.
            self._loggers[name] = logger

    def with_callbacks(self, files: Mapping[str, str]) -> Mapping[str, str]:
        """Return the files of a checkpoint with what it keeps of callbacks. Collective."""
        if not self._callbacks:
            return files
        states: dict[str, Any] = {}

        def ask(each: Callback) -> Any:
            return json.loads(json.dumps(each.state_dict(), allow_nan=False))

        run_on_all(lambda: states.update(self._call_callbacks(ask)), self._ranks)
        return {**files, **format_callbacks(self._run, states, self._ranks)}

    def _begin_callbacks(self) -> None:
        named = self._named_callbacks.items()
        self._callbacks = {name: _make_hook("callback", name, kind) for name, kind in named}
        if self._callbacks and self._resumed is not None:
            states = read_callbacks(self._resumed, self._run)
            for name in states.keys() & self._callbacks.keys():
                with self._translate_errors_of(name):
                    self._callbacks[name].load_state_dict(states[name])
        self._call_callbacks(lambda each: each.on_train_begin(self._run))

    def _call_logger(self, name: str, work: Callable[[Logger], None]) -> None:
        # A logger of a network or another package is left out once it fails: hours of training must
        # not end with it. A full disk ends the run, which could write no checkpoint.
        logger = self._loggers[name]
        if isinstance(logger, ProgressScreen | JsonLines | TensorBoard):
            return work(logger)
        try:
            with translate_errors(lambda error: _LoggerError(format_foreign_error(error))):
                work(logger)
        except _LoggerError as error:
            del self._loggers[name]
            self.show_lines([f"the logger {name!r} failed and is left out from here on: {error}"])

    def _call_callbacks(self, work: Callable[[Callback], Made]) -> dict[str, Made]:
        found = {}
        for name, callback in self._callbacks.items():
            with self._translate_errors_of(name):
                found[name] = work(callback)
        return found

    def _translate_errors_of(self, name: str) -> translate_errors:
        what = f"the callback {name!r} of run.callbacks failed behind step {self._run.step}"
        remedy = "Mend it, or take it out; --resume goes on from the newest checkpoint"
        return translate_errors(_make_error_translator(what, remedy))

    def _call_callbacks_or_stop(self, work: Callable[[Callback], None]) -> None:
        try:
            self._call_callbacks(work)
        # Raised between two steps it would leave the other ranks in the next collective.
        except GMetaError as error:
            self._stop.problem, self._stop.is_requested = self._stop.problem or error, True

    def _end_callbacks(self, status: Status) -> None:

        def end() -> None:
            if self._stop.problem is not None:
                raise self._stop.problem
            self._call_callbacks(lambda each: each.on_train_end(self._run, status))

        run_on_all(end, self._ranks)


def _make_hook(what: str, name: str, kind: type[Made]) -> Made:
    remedy = "A class that is made without arguments is needed (docs/extending.md)"
    with translate_errors(_make_error_translator(f"the {what} {name!r} cannot be made", remedy)):
        return kind()


def _make_error_translator(what: str, remedy: str) -> Callable[[Exception], GMetaError]:
    return lambda error: GMetaError(f"{what}: {format_foreign_error(error)}. {remedy}")
