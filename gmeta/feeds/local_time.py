"""What of a step's time is a rank's own, whatever its peers do: reading and computing.

A controller goes by it (docs/stragglers.md): by how long steps take, all ranks are alike."""

import time
from typing import final

import torch
from torch import Tensor

READING_KEPT = 0.75  # from step to step: a block is read in one and used in some


@final
class ReadTime:
    """How long a rank takes to read a task, over the last steps; where processes make batches,
    arranging them counts too.

    Counted by the tasks that were read, not by those of the step: batches are read ahead. After a
    change of the shares, batches that were read ahead are read again from memory, which says
    nothing about the storage."""

    def __init__(self) -> None:
        self._seen_s, self._seen = 0.0, 0  # totals
        self._newest_s, self._newest = 0.0, 0.0  # the newest steps weigh most
        self._steps_to_skip = 0

    def skip(self, num_steps: int) -> None:
        """Leave out the next `num_steps` steps, whose tasks are in memory already."""
        self._steps_to_skip = max(self._steps_to_skip, num_steps)

    def task_s(self, read_s: float, tasks_read: int) -> float:
        """Return the seconds that reading a task takes, from the totals of the rank's reader;
        called once a step."""
        if self._steps_to_skip:
            self._steps_to_skip -= 1
        else:
            self._newest_s = READING_KEPT * self._newest_s + read_s - self._seen_s
            self._newest = READING_KEPT * self._newest + tasks_read - self._seen
        self._seen_s, self._seen = read_s, tasks_read
        return self._newest_s / self._newest if self._newest else 0.0


@final
class ReadOverlap:
    """How much of the reading the rank's own computation does not hide.

    Batches are read while the rank computes, and while it waits for its peers. Nobody waits for a
    slow reader any more once its share has become small, because its peers' computation hides it;
    it is as slow as before, and with its old share all would wait for it again. So a rank's own
    time is max(reading, computing), whatever the others do."""

    def __init__(self, batches_ahead: int) -> None:
        self._batches_ahead = batches_ahead
        self._credit_s = 0.0  # computed while nothing was read: a later batch may take as long

    def exposed_s(self, read_s: float, compute_s: float) -> float:
        """Return how much of its reading shows in a step that read and computed for this long."""
        exposed_s = read_s - compute_s - self._credit_s
        self._credit_s = min(max(0.0, -exposed_s), self._batches_ahead * compute_s)
        return max(0.0, exposed_s)


@final
class LocalClock:
    """Time from the rows' arrival to their gradient's departure: what this rank computes by itself,
    whatever its peers do."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, rows_UD: Tensor) -> None:
        """Start the clock: the rows are here. It stops when backward reaches them."""
        if not rows_UD.requires_grad:
            return
        if rows_UD.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            rows_UD.register_hook(lambda _: self._events.append((begin, _record(end))))
            return
        began_s = time.perf_counter()
        rows_UD.register_hook(lambda _: self._add(time.perf_counter() - began_s))

    def _add(self, seconds: float) -> None:
        self._spent_s += seconds

    def take_s(self) -> float:
        """Return the seconds since the last call; on CUDA those of kernels that are through."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.pop(0)
            self._spent_s += begin.elapsed_time(end) / 1000
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def _record(event: torch.cuda.Event) -> torch.cuda.Event:
    event.record()
    return event
