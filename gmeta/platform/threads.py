"""How many threads a step takes on the CPU: whichever number is faster here and now; and what
becomes of torch's threads where this process is forked."""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import final
from weakref import WeakSet

import torch

# Rows x weights of a step below which nothing is gained: threads take longer to meet than to work.
LEAST_WORK = 10_000_000
# Above it, two threads are faster on cores of their own whatever else is true. Where results must
# not depend on the clock, this alone decides.
THREADED_WORK = 100_000_000
TRIES = 5  # of each number of threads in a trial
SHORTEST_HOLD, LONGEST_HOLD = 200, 3_200  # steps until the next trial
# Threads are in each other's way if so many steps in a row take so many times as long as on one
# thread. A single slow step may have waited for data.
SLOW_STEPS, TOO_SLOW = 2, 2.0


def work_to_predict(num_rows: int, num_weights: int, inner_steps: int) -> int:
    """Return the work of predicting, in rows x weights."""
    # An inner step passes the rows forward and back, the prediction forward alone.
    return num_rows * num_weights * (1 + 2 * inner_steps)


@final
class ThreadChoice:
    """One thread or `most`, by the time that each step took."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._chosen = 1
        self._hold = self._left = SHORTEST_HOLD
        self._slow_steps = 0
        self._begin_trial()

    def threads_for(self, work: int) -> int:
        """Return the number of threads for a step whose work is this many rows x weights."""
        if torch.are_deterministic_algorithms_enabled():
            return self._most if work >= THREADED_WORK else 1
        if work < LEAST_WORK:
            return 1
        # Threads meet after every product, and spin until then. With a core for each, two are 1.1
        # to 1.7 times as fast as one; where another program or a container's quota takes a core,
        # every product waits for the scheduler, and a step took up to fifty times as long. No
        # number is right for both, so it is tried out, again and again.
        return self._trial[-1] if self._trial else self._chosen

    @contextmanager
    def use_for(self, work: int) -> Iterator[None]:
        """Run the block, a step of this work, on the chosen number of threads."""
        before, threads = torch.get_num_threads(), self.threads_for(work)
        torch.set_num_threads(threads)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.record(time.perf_counter() - began, work, threads)
            # Another model's choice begins from the number before.
            torch.set_num_threads(before)

    def record(self, seconds: float, work: int, threads: int) -> None:
        """Take note of the seconds that a step of this work took on this number of threads."""
        if self._most == 1 or work < LEAST_WORK:
            return
        unit = seconds / work
        if threads > 1:
            # Between trials, too: a neighbour who comes must not slow thousands of steps.
            is_slow = unit > TOO_SLOW * self._median_unit_s(1)
            self._slow_steps = self._slow_steps + 1 if is_slow else 0
        if self._slow_steps == SLOW_STEPS:
            self._choose(1)
        elif self._trial:
            self._trial.pop()
            self._units[threads].append(unit)
            if not self._trial:
                self._choose(min(self._units, key=self._median_unit_s))
        else:
            self._left -= 1
            if not self._left:
                self._begin_trial()

    def _median_unit_s(self, threads: int) -> float:
        """Return the median seconds per unit of work in the last trial."""
        return statistics.median(self._units[threads] or [float("inf")])

    def _begin_trial(self) -> None:
        # In turn, so that a slow second falls on both.
        self._trial = [self._most, 1] * TRIES
        self._units: dict[int, list[float]] = {1: [], self._most: []}
        self._slow_steps = 0

    def _choose(self, threads: int) -> None:
        """Hold this number of threads for a while; longer where nothing has changed."""
        is_as_before = threads == self._chosen
        self._hold = min(2 * self._hold, LONGEST_HOLD) if is_as_before else SHORTEST_HOLD
        self._chosen, self._left = threads, self._hold
        self._trial, self._slow_steps = [], 0


_LOCKS: WeakSet[threading.Lock] = WeakSet()


def make_compute_lock() -> threading.Lock:
    """Return a lock for computing by torch, which a forked process finds free."""
    lock = threading.Lock()
    _LOCKS.add(lock)
    _prepare_for_forks()
    return lock


@cache
def _prepare_for_forks() -> None:
    """Have processes that are forked from now on find the locks free, and use one thread."""
    is_forking, held = threading.Lock(), list[threading.Lock]()

    def hold() -> None:
        is_forking.acquire()  # one thread forks at a time
        # A thread in the middle of an inner step has changed what the child would compute on.
        held.extend(_LOCKS)
        for lock in held:
            lock.acquire()

    def release() -> None:
        while held:
            held.pop().release()
        is_forking.release()

    def begin_child() -> None:
        # torch's threads, which load a model too, are not forked: the child would wait for them.
        torch.set_num_threads(1)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=begin_child)
