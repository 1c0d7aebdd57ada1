"""Which workers are slow, since when and why, by windows over their own time per task. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import final

from gmeta.antdt.reports import (
    CAUSES,
    STRAGGLERS,
    Cause,
    MonitorConfig,
    Report,
    Verdict,
    WorkerHealth,
)
from gmeta.antdt.windows import LongWindows, WorkerWindow, compare_windows, tasks_per_s

CUT_AFTER = 0.2  # share of a window: no window is cut shorter


@final
class _WorkerHistory:
    """Reports and windows of one process."""

    def __init__(self, incarnation: str, config: MonitorConfig) -> None:
        self.incarnation = incarnation
        self.newest: Report | None = None
        self.at_window_start: Report | None = None
        self.at_long_start: Report | None = None  # start of the window that is not cut short
        self.last: Report | None = None  # what it did in the last window with news,
        self.num_idle = 0  # and how many windows without came after it
        self.long = LongWindows(config)
        self.short: deque[WorkerWindow] = deque(maxlen=config.short_windows)
        self.num_windows = 0
        self.verdict: Verdict = "unknown"
        self.slow_since_s = 0.0
        self.num_slow = 0
        self.slow_from_the_start = False

    def add_long(self, window: WorkerWindow) -> None:
        """Take in a window that was not cut short."""
        self.long.add(window)
        config = self.long.config
        self.num_windows += 1
        self.num_slow += window.ratio >= config.recovered_ratio
        if self.num_windows == config.short_windows:
            self.slow_from_the_start = self.num_slow >= config.short_slow

    def totals_of_window(self) -> Report | None:
        """Return the totals since the window began; None without a finished task."""
        return _subtract_reports(self.at_window_start, self.newest)

    def take_delta(self) -> Report | None:
        """Return the totals of the window, and begin the next one."""
        delta = self.totals_of_window()
        self.num_idle += 1
        if delta is not None:
            self.at_window_start, self.last, self.num_idle = self.newest, delta, 0
        return delta

    def take_long_delta(self) -> Report | None:
        """Return the totals of the window that was not cut short, and begin the next one."""
        delta = _subtract_reports(self.at_long_start, self.newest)
        if delta is not None:
            self.at_long_start = self.newest
        return delta

    def has_changed_pace(self, ratio: float) -> bool:
        """Return whether own time per task changed by `ratio` since the last window."""
        totals = self.totals_of_window()
        if totals is None or not self.short:
            return False
        # Own time is compute, data wait and own transfers: waiting for peers says nothing about
        # this rank. AntDT (arXiv 2404.09679) calls it batch processing time; per task it survives
        # unequal batches.
        now_ms, then_ms = sum(totals.own_ms) / totals.tasks_done, self.short[-1].own_ms
        return not then_ms / ratio < now_ms < then_ms * ratio


def _subtract_reports(before: Report | None, newest: Report | None) -> Report | None:
    if before is None or newest is None or newest.tasks_done <= before.tasks_done:
        return None
    return newest.since(before)


@final
class Monitor:
    """Judges every worker at the end of each window, by what `observe` has taken in."""

    def __init__(self, config: MonitorConfig, now_s: float) -> None:
        self.config = config
        self._workers: dict[str, _WorkerHistory] = {}
        self._window_end_s = now_s + config.window_s
        self._may_cut_s = now_s + CUT_AFTER * config.window_s
        self.health: dict[str, WorkerHealth] = {}

    def observe(self, worker_id: str, incarnation: str, report: Report) -> None:
        """Take in a worker's newest totals; another incarnation begins a new history."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            worker = self._workers[worker_id] = _WorkerHistory(incarnation, self.config)
        if worker.at_window_start is None:
            # Totals until now say nothing about a window.
            worker.at_window_start = worker.at_long_start = report
        # Heartbeats may overtake each other: an older total is no news.
        if worker.newest is None or report.tasks_done >= worker.newest.tasks_done:
            worker.newest = report

    def forget(self, worker_ids: Iterable[str]) -> None:
        """Drop what is known of workers that left, so that none is compared with them."""
        for worker_id in worker_ids:
            self._workers.pop(worker_id, None)
            self.health.pop(worker_id, None)

    def close_window(self, now_s: float) -> bool:
        """Judge every worker if the window is over or cut short; return whether it was."""
        is_over = now_s >= self._window_end_s
        if not is_over and not self._cut_short(now_s):
            return False
        self._may_cut_s = now_s + CUT_AFTER * self.config.window_s
        judged = self._windows(_WorkerHistory.take_delta)
        for name, window in judged.items():
            self._workers[name].short.append(window)
        if is_over:
            self._window_end_s = now_s + self.config.window_s
            for name, window in self._windows(_WorkerHistory.take_long_delta).items():
                self._workers[name].add_long(window)
        for name in judged:
            worker = self._workers[name]
            worker.verdict = self._judge(worker, now_s)
            self.health[name] = self._describe(name, worker, now_s)
        return True

    def _cut_short(self, now_s: float) -> bool:
        """Return whether all workers have news and some became much slower or faster."""
        # They hurried their reports: the reaction need not wait for the end of the window.
        workers, ratio = self._workers.values(), self.config.slow_ratio
        return (
            now_s >= self._may_cut_s
            and all(worker.totals_of_window() is not None for worker in workers)
            and any(worker.has_changed_pace(ratio) for worker in workers)
        )

    def _windows(self, take: Callable[[_WorkerHistory], Report | None]) -> dict[str, WorkerWindow]:
        reports = {name: take(worker) for name, worker in self._workers.items()}
        deltas = {name: report for name, report in reports.items() if report is not None}
        idle: dict[str, Report] = {}
        if 2 * len(deltas) <= len(self._workers):
            # At the end of the data only slow ones are left: they are compared with what the others
            # did last. Two windows without news: a single one may lie between two long steps.
            last = {name: w.last for name, w in self._workers.items() if w.num_idle > 1}
            idle = {name: report for name, report in last.items() if report is not None}
        windows = compare_windows({**idle, **deltas}, self.config)
        return {name: windows[name] for name in deltas}

    def _judge(self, worker: _WorkerHistory, now_s: float) -> Verdict:
        config, short = self.config, worker.short
        if len(short) < config.short_slow:
            return "unknown"
        if worker.verdict in STRAGGLERS:
            # Recovery has a lower ratio than slowness, so that a verdict does not flicker.
            recovered = sum(window.ratio < config.recovered_ratio for window in short)
            if recovered >= config.short_slow:
                return "healthy"
        elif sum(window.is_slow for window in short) < config.short_slow:
            return "healthy"
        else:
            # It had been slow for this many windows before it was called so.
            worker.slow_since_s = now_s - config.short_slow * config.window_s
        long = worker.long
        if len(long.windows) < config.long_windows or long.num_slow < config.long_slow:
            return "transient"
        # Of all its windows as large a share as of the long ones must be slow; without a division.
        always = worker.num_slow * config.long_windows >= worker.num_windows * config.long_slow
        of_hardware = worker.slow_from_the_start and always
        steady = of_hardware and long.spread() <= config.steady_spread
        return "deterministic" if steady else "persistent"

    def _describe(self, name: str, worker: _WorkerHistory, now_s: float) -> WorkerHealth:
        short, long = worker.short, worker.long
        is_straggler = worker.verdict in STRAGGLERS
        ratio = sum(window.ratio for window in short) / len(short)
        return WorkerHealth(
            name,
            worker.verdict,
            _largest_excess(short) if is_straggler else "",
            ratio,
            tasks_per_s(short),
            # Windows cut short may come before the first whole one.
            1000 * long.tasks / long.work_ms if long.work_ms > 0 else tasks_per_s(short),
            1000 / short[-1].work_ms if short[-1].work_ms > 0 else 0.0,
            long.overhead_ms(),
            now_s - worker.slow_since_s if is_straggler else 0.0,
            _describe_evidence(short, long, ratio, self.config) if is_straggler else "",
            # The least: a pause of the whole job shows in one window, not in all of them.
            min(window.peer_wait_ms for window in short),
        )


def _largest_excess(windows: Sequence[WorkerWindow]) -> Cause:
    """Return the part of the time with the largest excess over the others."""
    excess = [fmean(window.excess_ms[i] for window in windows) for i in range(len(CAUSES))]
    return CAUSES[excess.index(max(excess))]


def _describe_evidence(
    short: Sequence[WorkerWindow], long: LongWindows, ratio: float, config: MonitorConfig
) -> str:
    parts = ", ".join(
        f"{cause} {fmean(window.excess_ms[i] for window in short):+.2f}"
        for i, cause in enumerate(CAUSES)
    )
    # A verdict lasts down to a lower ratio than it began at: without a word on that, it would
    # contradict the ratio beside it.
    since = (
        ""
        if ratio > config.slow_ratio
        else f" (it was above {config.slow_ratio:g}, and counts as slow until {config.short_slow} "
        f"of {config.short_windows} windows are below {config.recovered_ratio:g})"
    )
    return (
        f"{ratio:.2f} times the others' time per task over the last {len(short)} windows{since}, "
        f"slow in {long.num_slow} of {len(long.windows)}; ms per task against the others: {parts}"
    )
