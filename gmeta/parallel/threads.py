"""How many threads a rank's steps take on the CPU: whichever number is faster here and now.

Threads meet after every product, and until then they spin. With a core for each, two are 1.1 to 1.7
times as fast as one; where another program or a container's quota takes a core from one of them,
every product waits for the scheduler, and a step took up to fifty times as long. No number of
threads is right for both, so it is tried out, again and again.
"""

import math
from typing import final

import torch

# Rows x weights of a step below which nothing is gained: threads take longer to meet than to work.
LEAST_WORK = 10_000_000
# Above it, two threads are faster on cores of their own whatever else is true. Where results must
# not depend on the clock, this alone decides.
THREADED_WORK = 100_000_000
TRIES = 5  # of each number of threads in a trial
SHORTEST_HOLD, LONGEST_HOLD = 200, 3_200  # steps until the next trial
# So many times as long as on one thread, and the others are in the way; in a trial, whose first
# steps may make what later ones find, more.
TOO_SLOW, TOO_SLOW_TO_TRY = 2.0, 10.0


@final
class ThreadChoice:
    """One thread or `most`; told what each step took."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._chosen = 1
        self._hold = SHORTEST_HOLD
        self._left = 0  # steps until the next trial
        self._begin_trial()

    def threads_for(self, work: int) -> int:
        """Of a step of so many rows x weights."""
        if torch.are_deterministic_algorithms_enabled():
            return self._most if work >= THREADED_WORK else 1
        if work < LEAST_WORK:
            return 1
        return self._trial[-1] if self._trial else self._chosen

    def took(self, seconds: float, work: int, threads: int) -> None:
        """What such a step took on so many threads."""
        if self._most == 1 or work < LEAST_WORK:
            return
        unit = seconds / work
        is_trial = bool(self._trial)
        self._least[threads] = min(self._least[threads], unit)
        too_slow = TOO_SLOW_TO_TRY if is_trial else TOO_SLOW
        if threads > 1 and unit > too_slow * self._least[1]:
            self._choose(1)
        elif is_trial:
            self._trial.pop()
            if not self._trial:
                self._choose(min(self._least, key=lambda number: self._least[number]))
        else:
            self._left -= 1
            if not self._left:
                self._begin_trial()

    def _begin_trial(self) -> None:
        self._trial = [self._most, 1] * TRIES
        self._least = {1: math.inf, self._most: math.inf}

    def _choose(self, threads: int) -> None:
        """For a while; longer where nothing has changed."""
        is_as_before = threads == self._chosen
        self._hold = min(2 * self._hold, LONGEST_HOLD) if is_as_before else SHORTEST_HOLD
        self._chosen, self._left = threads, self._hold
        self._trial = []
