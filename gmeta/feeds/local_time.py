"""A rank's own part of a step's time, whatever its peers do: reading and computing."""

import time
from typing import final

import torch
from torch import Tensor

# A controller goes by it (docs/stragglers.md): steps take all ranks equally long.
READING_KEPT = 0.75  # from step to step: a block is read in one and used in some


@final
class ReadTime:
    """The time a rank takes to read a task, over the last steps; processes collate in it, too."""

    def __init__(self) -> None:
        # Of the tasks that were read, not of the step's: batches are read ahead.
        self._seen_s, self._seen = 0.0, 0  # totals
        self._newest_s, self._newest = 0.0, 0.0  # the newest steps weigh most
        self._steps_to_skip = 0

    def skip(self, num_steps: int) -> None:
        """Leave out the next `num_steps` steps."""
        # After a change of shares these tasks come from memory, and say nothing of the storage.
        self._steps_to_skip = max(self._steps_to_skip, num_steps)

    def task_s(self, read_s: float, tasks_read: int) -> float:
        """Return the seconds of reading a task, from the reader's totals. Call it once a step."""
        if self._steps_to_skip:
            self._steps_to_skip -= 1
        else:
            self._newest_s = READING_KEPT * self._newest_s + read_s - self._seen_s
            self._newest = READING_KEPT * self._newest + tasks_read - self._seen
        self._seen_s, self._seen = read_s, tasks_read
        return self._newest_s / self._newest if self._newest else 0.0


@final
class ReadOverlap:
    """Data-loading time that this rank's compute does not overlap."""

    def __init__(self, batches_ahead: int) -> None:
        # Once a slow reader's share is small, its peers' compute hides its reading; with its old
        # share all would wait again. So a rank's own time is max(reading, computing).
        self._batches_ahead = batches_ahead
        self._credit_s = 0.0  # computed while nothing was read: a later batch may take as long

    def exposed_s(self, read_s: float, compute_s: float) -> float:
        """Return the part of its reading that shows in a step that read and computed this long."""
        exposed_s = read_s - compute_s - self._credit_s
        self._credit_s = min(max(0.0, -exposed_s), self._batches_ahead * compute_s)
        return max(0.0, exposed_s)


@final
class LocalClock:
    """Time from the rows' arrival to their gradient's departure: this rank's own computing."""

    def __init__(self) -> None:
        self.num_started = 0
        self._timed: list[tuple[int, float]] = []
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, rows_UD: Tensor) -> None:
        """Start the clock: the rows are here. It stops when backward reaches them."""
        # Predictions have no backward that would stop the clock.
        if not rows_UD.requires_grad:
            return
        self.num_started += 1
        number = self.num_started
        if rows_UD.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            rows_UD.register_hook(lambda _: self._events.append((number, begin, _record(end))))
            return
        began_s = time.perf_counter()
        rows_UD.register_hook(lambda _: self._timed.append((number, time.perf_counter() - began_s)))

    def take(self) -> list[tuple[int, float]]:
        """Return number, from 1, and seconds of each step that was timed since the last call; on
        CUDA of those whose kernels have ended."""
        # Only events that have happened: waiting for others would hold up the host.
        while self._events and self._events[0][2].query():
            number, begin, end = self._events.pop(0)
            self._timed.append((number, begin.elapsed_time(end) / 1000))
        timed, self._timed = self._timed, []
        return timed


def _record(event: torch.cuda.Event) -> torch.cuda.Event:
    event.record()
    return event
