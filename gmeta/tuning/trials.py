"""Runs the trials of a study, each an ordinary run in a folder and a process of its own."""

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

# How often the logs of the runs are read for new validations.
POLL_S = 0.25

# (config as JSON, file for its output, place among those that run at a time, pipe for its report)
# -> nothing: the work of a process, which ends with it.
Work = Callable[[dict[str, Any], str, int, Connection], None]


@dataclass(frozen=True)
class TrialReport:
    """What a trial's process reports at its end, or that of the boosted trees."""

    # None: undefined. `adapts` says how the run adapts for it, `failure` why it failed.
    score: float | None = None
    adapts: str = ""
    failure: str = ""
    # A full disk or the like: not the trial's fault.
    is_write_failure: bool = False


@dataclass
class _RunningTrial:
    """A trial's process; `num_reported` counts its validations that Optuna has."""

    process: Any
    connection: Connection
    folder: RunFolder
    place: int  # among those that run at a time, from 0 on
    num_reported: int = 0
    pruned: bool = False


@final
class TrialRunner:
    """Runs trials of a study in the folder `trials` beside its journal."""

    def __init__(
        self, study: Study, folder: Path, metric: str, work: Work, context: ForkServerContext
    ) -> None:
        self._study, self._folder, self._metric, self._work = study, folder, metric, work
        self._context = context
        self._running: dict[int, _RunningTrial] = {}

    def run(self, num_trials: int, parallel: int) -> Iterator[Trial]:
        """Run trials, `parallel` at a time, until `num_trials` are tried; yield each as it ends."""
        try:
            while True:
                while len(self._running) < parallel and self._study.count_tried() < num_trials:
                    self._start(*self._study.propose_trial())
                if not self._running:
                    return
                wait([each.process.sentinel for each in self._running.values()], POLL_S)
                for number, running in list(self._running.items()):
                    # Read before the log: what the run wrote until its end is then in it.
                    over = not running.process.is_alive()
                    self._report_validations(number, running)
                    if over:
                        yield self._end(number, running)
        finally:
            for running in self._running.values():
                # The caller may leave early, as after Ctrl-C or an error.
                running.process.kill()
                running.process.join()

    def folder_of(self, number: int) -> RunFolder:
        """Return the run folder of a trial."""
        return RunFolder(self._folder / "trials" / f"{number:04d}")

    def _start(self, number: int, values: dict[str, Any]) -> None:
        folder = self.folder_of(number)
        folder.root.parent.mkdir(exist_ok=True)
        # A folder of this number is left of an earlier journal that was lost.
        shutil.rmtree(folder.root, ignore_errors=True)
        config = self._study.config(values)
        config = replace(config, run=make_trial_run(config.run, folder.root))
        log = folder.root.with_suffix(".log")
        # The lowest free place: it chooses the trial's GPU.
        used_places = {each.place for each in self._running.values()}
        place = next(place for place in count() if place not in used_places)
        process, connection = start_process(self._context, self._work, config.to_json(), log, place)
        self._running[number] = _RunningTrial(process, connection, folder, place)

    def _report_validations(self, number: int, running: _RunningTrial) -> None:
        readings = [line["valid"] for line in running.folder.read_metrics() if "valid" in line]
        for step in range(running.num_reported, len(readings)):
            running.num_reported += 1
            score = readings[step].get(self._metric)
            if self._study.report_score(number, step, score) and not running.pruned:
                running.pruned = True
                # Not killed: on SIGTERM it commits its checkpoint and frees its folder.
                running.process.terminate()

    def _end(self, number: int, running: _RunningTrial) -> Trial:
        process = running.process
        report = wait_for_report(process, running.connection)
        del self._running[number]
        # No other trial would fare better on a full disk: the study stops here.
        if report.is_write_failure:
            raise GMetaError(
                f"trial {number}: {report.failure}. It is not counted: once there is space, the "
                "same command of gmeta tune tries its values again"
            )
        if running.pruned:
            trial = self._study.finish_trial(number, "pruned")
        elif process.exitcode or report.failure:
            note, code = f"ended with exit code {process.exitcode}", process.exitcode
            if code < 0:
                note = f"killed by {signal.Signals(-code).name}, as when memory runs out"
            note = f"{note}; see {running.folder.root.with_suffix('.log')}"
            trial = self._study.finish_trial(number, "failed", report.failure or note)
        else:
            trial = self._study.finish_trial(number, "complete", report.adapts, report.score)
        best = self._study.best_trial()
        for ended in self._study.trials():
            # Checkpoints may be large, and a trial is never resumed: the best trial's stay alone.
            if best is None or ended.number != best.number:
                shutil.rmtree(self.folder_of(ended.number).checkpoints, ignore_errors=True)
        return trial


def start_process(
    context: ForkServerContext, work: Work, config: dict[str, Any], log: Path, place: int = 0
) -> tuple[Any, Connection]:
    """Start a process that does `work`; return it and the pipe that it reports to."""
    receiver, sender = context.Pipe(duplex=False)
    arguments = config, str(log), place, sender
    # A daemon: a trial must not outlive `gmeta tune`.
    process = context.Process(target=work, args=arguments, daemon=True)
    start(process)
    # With this end closed the pipe ends when the process does, however that happens.
    sender.close()
    return process, receiver


def wait_for_report(process: Any, receiver: Connection) -> TrialReport:
    """Wait for the end of a process, and return its last report."""
    process.join()
    last = TrialReport()
    # The process has ended, so the pipe has something to read or is at its end: poll does not wait.
    with receiver, suppress(EOFError):
        while receiver.poll():
            last = receiver.recv()
    return last


def make_trial_run(run: RunConfig, folder: Path) -> RunConfig:
    """Return the study's [run] section in a folder of the trial's own, with one checkpoint kept."""
    return replace(run, dir=str(folder), keep_last=1)


@contextmanager
def trial_processes(parallel: int, preload: str) -> Iterator[ForkServerContext]:
    """Yield the context of the trials' processes, which start with the module `preload`; Ctrl-C in
    the block gets a note on how to go on."""
    cores = len(os.sched_getaffinity(0))
    # Equal shares of the cores, unless the user says how many threads each process has.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // parallel)))
    before = tempfile.tempdir
    # multiprocessing puts its sockets there: the command line ends without the exit handlers that
    # would remove them.
    with tempfile.TemporaryDirectory(prefix="gmeta-tune-") as folder:
        tempfile.tempdir = folder
        try:
            yield forking_context([preload])
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("trials that ended count: the same command goes on behind them")
            raise
        finally:
            tempfile.tempdir = before
