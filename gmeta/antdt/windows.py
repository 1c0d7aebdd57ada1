"""Windows of a worker's time, each compared with the other workers in the same window. Pure:
differences of reports go in. The monitor draws conclusions from many windows."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median_low, quantiles
from typing import NamedTuple, final

from gmeta.antdt.reports import MonitorConfig, Report


class WorkerWindow(NamedTuple):
    """One worker in one window; times are ms per task, by cause in the order of CAUSES."""

    tasks: int
    steps: int
    own_ms: float
    work_ms: float  # compute and data wait: shorter with fewer tasks
    ratio: float
    is_slow: bool
    excess_ms: tuple[float, float, float]  # above the median of the others
    peer_wait_ms: float  # of a step


@final
class LongWindows:
    """The long windows of a worker with their sums."""

    def __init__(self, config: MonitorConfig) -> None:
        self.windows: deque[WorkerWindow] = deque()
        # Sums, so that a new window costs the same however many there are.
        self.num_slow = 0  # above the ratio of recovery: a straggler stays one down to it
        self.tasks = 0
        self.work_ms = 0.0
        self.config = config
        # Of tasks per step (x) and working time per step (y), forgotten at the rate of the windows.
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, window: WorkerWindow) -> None:
        """Take in the newest window, drop the oldest."""
        if len(self.windows) == self.config.long_windows:
            self._count_in(self.windows.popleft(), -1)
        self.windows.append(window)
        self._count_in(window, 1)
        # A window may end within a step that is longer than it.
        if window.steps > 0:
            keep = 1 - 1 / self.config.long_windows
            x, y = window.tasks / window.steps, window.tasks * window.work_ms / window.steps
            self._count = keep * self._count + 1
            self._x, self._y = keep * self._x + x, keep * self._y + y
            self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y

    def _count_in(self, window: WorkerWindow, sign: int) -> None:
        self.num_slow += sign * (window.ratio >= self.config.recovered_ratio)
        self.tasks += sign * window.tasks
        self.work_ms += sign * window.tasks * window.work_ms

    def overhead_ms(self) -> float:
        """Return the part of a step's own time that does not depend on its tasks."""
        # The intercept of own time against tasks per step, by least squares; 0 if x hardly varied.
        if self._count < 2:
            return 0.0
        x, y = self._x / self._count, self._y / self._count
        variance = self._xx / self._count - x * x
        if variance < (0.1 * x) ** 2:
            return 0.0
        gradient = (self._xy / self._count - x * y) / variance
        # Noise may put the line through zero or below; at least a tenth is the tasks' own.
        return min(max(0.0, y - gradient * x), 0.9 * y)

    def spread(self) -> float:
        """Return (p90 - p10) / median of the ratio."""
        deciles = quantiles((window.ratio for window in self.windows), n=10, method="inclusive")
        return (deciles[8] - deciles[0]) / deciles[4] if deciles[4] > 0 else 0.0


def compare_windows(deltas: Mapping[str, Report], config: MonitorConfig) -> dict[str, WorkerWindow]:
    """Return the window of every worker, compared with the median of the others."""
    parts = [tuple(ms / delta.tasks_done for ms in delta.own_ms) for delta in deltas.values()]
    own_ms = [sum(part) for part in parts]
    typical_own = _medians_of_others(own_ms)
    typical = list(
        zip(*(_medians_of_others([part[i] for part in parts]) for i in range(3)), strict=True)
    )
    windows = {}
    for index, (name, delta) in enumerate(deltas.items()):
        compute, reader, network = (
            part - median for part, median in zip(parts[index], typical[index], strict=True)
        )
        ratio = own_ms[index] / typical_own[index] if typical_own[index] > 0 else 1.0
        # A ratio alone would call a worker slow for some microseconds a task.
        is_slow = ratio > config.slow_ratio and own_ms[index] - typical_own[index] > config.floor_ms
        windows[name] = WorkerWindow(
            delta.tasks_done,
            delta.step,
            own_ms[index],
            parts[index][0] + parts[index][1],
            ratio,
            is_slow,
            (compute, reader, network),
            delta.peer_wait_ms / max(1, delta.step),
        )
    return windows


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return, for each value, the median of all others (itself where it is alone)."""
    if len(values) < 2:
        return list(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked = [values[index] for index in order]
    medians = [0.0] * len(values)
    # Taking a value out moves the middle up by a place if the value stands at or below it.
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # among the n - 1 others
    for place, index in enumerate(order):
        below = ranked[low + 1] if place <= low else ranked[low]
        above = ranked[high + 1] if place <= high else ranked[high]
        medians[index] = (below + above) / 2
    return medians


def tasks_per_s(windows: Sequence[WorkerWindow]) -> float:
    """Return the median speed of the windows."""
    # The median: a window in which the shares change mixes both speeds. Of two windows the faster:
    # the other may include the start.
    task_ms = median_low([window.work_ms for window in windows])
    return 1000 / task_ms if task_ms > 0 else 0.0
