"""Cuts a step's ordered episodes into contiguous slices of equal cost, one for each rank.

Shape suffixes: E chosen episodes, W ranks or workers"""

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metaio.ragged import Int32, Int64, offsets

Float64 = npt.NDArray[np.float64]

# Of the largest cost: a step of a billion episodes still adds up exactly in 64 bits.
_FINENESS = 1 << 31
# The longest slice is at most this part longer than the shortest longest slice that there is.
TOLERANCE = 2.0**-12


class TaskCost(NamedTuple):
    """What an episode costs its rank, in any unit: only ratios count."""

    per_task: float
    per_row: float

    def of_episodes(self, num_rows_E: Int32) -> Float64:
        """Return the cost of each episode, from its support and query rows."""
        # Events of a task, where a dataset stores some, belong here: one more count an episode.
        return self.per_task + self.per_row * num_rows_E.astype(np.float64)

    def of_batch(self, num_tasks: float, num_rows: float) -> float:
        """Return the cost of so many tasks that have so many rows together."""
        return self.per_task * num_tasks + self.per_row * num_rows


# Of the bisection each probe packs slices greedily, which is exact for slices of consecutive
# episodes: as few as possible within the limit.
def cut_evenly(costs_E: npt.NDArray[Any], world_size: int) -> Int64:
    """Return where each rank's slice begins, [W + 1] with the number of episodes at the end: the
    longest slice is as short as it can be, to one part in 4,096. Equal costs give equal numbers.

    >>> cut_evenly(np.array([3, 1, 1, 1]), 2).tolist()
    [0, 1, 4]"""
    num_episodes = len(costs_E)
    ranks_W1 = np.arange(world_size + 1)
    largest = costs_E.max(initial=0)
    if largest <= 0 or world_size == 1:
        return ranks_W1 * num_episodes // world_size
    # Whole numbers: equal costs stay equal, and every rank on every machine cuts alike.
    cost_E = np.rint(costs_E * (_FINENESS / largest)).astype(np.int64)
    sums = offsets(cost_E).tolist()
    low, high = max(-(-sums[-1] // world_size), _FINENESS), sums[-1] // world_size + _FINENESS
    tolerance = int(low * TOLERANCE)
    while high - low > tolerance:
        limit = (low + high) // 2
        if _first_starts(sums, limit, world_size)[0] > 0:
            low = limit + 1
        else:
            high = limit
    earliest = _first_starts(sums, high, world_size)
    cuts = [0]
    for rank in range(1, world_size):
        # Of all cuts within the limit those nearest to even ones, so that equal costs give equal
        # numbers, and no rank has little just because another has much.
        even = bisect_right(sums, rank * sums[-1] // world_size) - 1
        latest = bisect_right(sums, sums[cuts[-1]] + high) - 1
        cuts.append(min(max(even, earliest[rank], cuts[-1]), latest))
    return np.array([*cuts, num_episodes])


def _first_starts(sums: list[int], limit: int, world_size: int) -> list[int]:
    """Return the earliest start of each rank's slice where it and all later ones keep the limit;
    above 0 for rank 0: they do not."""
    starts = [len(sums) - 1]
    for _ in range(world_size):
        starts.append(bisect_left(sums, sums[starts[-1]] - limit))
    return starts[:0:-1]
