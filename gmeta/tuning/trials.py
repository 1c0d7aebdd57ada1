"""Runs the trials of a study as processes, a few at a time, and hears what they score.

A trial is an ordinary run in a folder of its own. Its process is forked from one that has imported
torch once; what it prints goes to a file beside its run folder.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, final

from gmeta.config.train_config import RunConfig
from gmeta.errors import GMetaError
from gmeta.platform.forking import forking_context, start
from gmeta.runs.run_folder import RunFolder
from gmeta.tuning.study import Study, Trial

POLL_S = 0.25  # how long a validation may lie in a run's log unheard

# (config as JSON, path of what it prints, place among those that run at a time, pipe for what it
# says) -> nothing; it runs in a process of its own, which ends with it.
Work = Callable[[dict[str, Any], str, int, Connection], None]


@dataclass(frozen=True)
class TrialReport:
    """What a trial's process says at its end: the run's score (None: undefined) and a line on how
    it adapted for it, or a line on why it failed; `unwritten` if that was for want of a disk."""

    score: float | None = None
    adapts: str = ""
    failure: str = ""
    is_write_failure: bool = False


@dataclass
class _RunningTrial:
    """A trial's process; `heard` counts its validations that were reported."""

    process: Any
    connection: Connection
    folder: RunFolder
    place: int  # among those that run at a time, from 0 on
    num_reported: int = 0
    pruned: bool = False


@final
class TrialRunner:
    """Trials of a study, in the folder `trials` beside its journal."""

    def __init__(
        self, study: Study, folder: Path, metric: str, work: Work, context: ForkServerContext
    ) -> None:
        """Prepare for trials that do `work` in processes of the context."""
        self._study, self._folder, self._metric, self._work = study, folder, metric, work
        self._context = context
        self._running: dict[int, _RunningTrial] = {}

    def run(self, num_trials: int, parallel: int) -> Iterator[Trial]:
        """Run trials until the study has tried `num_trials`, `parallel` at a time; yield each as it
        ends. What still runs when the caller leaves is ended. Raises GMetaError: the disk did not
        take what a trial wrote; no other trial would fare better."""
        try:
            while True:
                while len(self._running) < parallel and self._study.count_tried() < num_trials:
                    self._start(*self._study.propose_trial())
                if not self._running:
                    return
                wait([each.process.sentinel for each in self._running.values()], POLL_S)
                for number, running in list(self._running.items()):
                    # Before its log is read: what it wrote until its end is heard.
                    over = not running.process.is_alive()
                    self._report_validations(number, running)
                    if over:
                        yield self._end(number, running)
        finally:
            for running in self._running.values():
                running.process.kill()
                running.process.join()

    def folder_of(self, number: int) -> RunFolder:
        """Return the run folder of a trial."""
        return RunFolder(self._folder / "trials" / f"{number:04d}")

    def _start(self, number: int, values: dict[str, Any]) -> None:
        folder = self.folder_of(number)
        folder.root.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder.root, ignore_errors=True)  # of a journal that is lost
        config = self._study.config(values)
        config = replace(config, run=make_trial_run(config.run, folder.root))
        log = folder.root.with_suffix(".log")
        used_places = {each.place for each in self._running.values()}
        place = next(place for place in count() if place not in used_places)
        process, connection = start_process(self._context, self._work, config.to_json(), log, place)
        self._running[number] = _RunningTrial(process, connection, folder, place)

    def _report_validations(self, number: int, running: _RunningTrial) -> None:
        """Report the validations that the run has logged since the last time."""
        readings = [line["valid"] for line in running.folder.read_metrics() if "valid" in line]
        for step in range(running.num_reported, len(readings)):
            running.num_reported += 1
            score = readings[step].get(self._metric)
            if self._study.report_score(number, step, score) and not running.pruned:
                running.pruned = True
                # Not killed: it commits its checkpoint and frees its folder.
                running.process.terminate()

    def _end(self, number: int, running: _RunningTrial) -> Trial:
        process = running.process
        report = wait_for_report(process, running.connection)
        del self._running[number]
        if report.is_write_failure:
            raise GMetaError(
                f"trial {number}: {report.failure}. It is not counted: once there is space, the "
                "same "
                "command of gmeta tune tries its values again"
            )
        if running.pruned:
            trial = self._study.finish_trial(number, "pruned")
        elif process.exitcode or report.failure:
            note = report.failure or self._describe_failure(number, process)
            trial = self._study.finish_trial(number, "failed", note)
        else:
            trial = self._study.finish_trial(number, "complete", report.adapts, report.score)
        self._keep_best_only()
        return trial

    def _describe_failure(self, number: int, process: Any) -> str:
        log = self.folder_of(number).root.with_suffix(".log")
        code = process.exitcode
        if code < 0:
            return f"killed by {signal.Signals(-code).name}, as when memory runs out; see {log}"
        return f"ended with exit code {code}; see {log}"

    def _keep_best_only(self) -> None:
        """Remove the checkpoints of all trials that ended but the best: they may be large."""
        best = self._study.best_trial()
        for trial in self._study.trials():
            if best is None or trial.number != best.number:
                shutil.rmtree(self.folder_of(trial.number).checkpoints, ignore_errors=True)


def start_process(
    context: ForkServerContext, work: Work, config: dict[str, Any], log: Path, place: int = 0
) -> tuple[Any, Connection]:
    """Start a process that does `work` with a config as JSON; return it and the pipe that it
    reports to."""
    receiver, sender = context.Pipe(duplex=False)
    arguments = config, str(log), place, sender
    process = context.Process(target=work, args=arguments, daemon=True)
    start(process)
    sender.close()
    return process, receiver


def wait_for_report(process: Any, receiver: Connection) -> TrialReport:
    """Wait for the end of a process, and return what it said last."""
    process.join()
    last = TrialReport()
    # The other end of the pipe is closed by now: there is something to read, or the end.
    with receiver, suppress(EOFError):
        while receiver.poll():
            last = receiver.recv()
    return last


def make_trial_run(run: RunConfig, folder: Path) -> RunConfig:
    """Return the [run] section of a trial: that of its study in a folder of its own, which keeps
    only the last checkpoint."""
    return replace(run, dir=str(folder), keep_last=1)


@contextmanager
def trial_processes(parallel: int, preload: str) -> Iterator[ForkServerContext]:
    """Give the context of a trial's processes, which start with the module `preload` imported.

    They have equal shares of the cores, unless OMP_NUM_THREADS says how many threads each has.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // parallel)))
    before = tempfile.tempdir
    # The command line ends without the exit handlers that would remove multiprocessing's sockets.
    with tempfile.TemporaryDirectory(prefix="gmeta-tune-") as folder:
        tempfile.tempdir = folder
        try:
            yield forking_context([preload])
        finally:
            tempfile.tempdir = before
