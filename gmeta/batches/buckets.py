"""Sizes rounded up to few, so that the batches of a ragged run have few shapes: a CUDA graph is
captured once for each (graphs.py), and torch's allocator gives the same blocks out again.

Rows, tasks and entries that pad stand in no sum: they cost time, and change no loss beyond its
rounding. A size goes up to the next of a geometric series, never below its least: what is small
costs nothing.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# One rectangle of all tasks; a second one where few are long. With a third, a heavy tail has twice
# as many shapes (docs/gpu.md), as the cuts fall elsewhere in every batch.
MOST_RECTANGLES = 2


class Series(NamedTuple):
    """Sizes that may be: from `least` on, so many from one power of two to the next; beyond `fine`,
    itself a power of two, the powers alone.
    """

    least: int
    steps: int
    fine: int = 1 << 62

    def of(self, size: int) -> int:
        """Return the smallest of them that holds this size."""
        return int(self.of_all(np.array([size]))[0])

    def of_all(self, sizes: Ints) -> Ints:
        """Return the smallest of them that hold these sizes; 0 for 0."""
        at_least = np.maximum(sizes, self.least)
        # frexp is exact: 2 ** (power - 1) is the power of two below a size, or half of it itself.
        _, power = np.frexp(at_least - 1)
        steps = np.where(at_least > self.fine, 1, self.steps)
        step = np.maximum((1 << np.maximum(power.astype(np.int64) - 1, 0)) // steps, 1)
        rounded: Ints = np.where(sizes == 0, 0, -(-at_least // step) * step)
        return rounded


# A rank has about as many tasks in every step, so finer steps add no shapes; of a few long tasks
# there are sometimes more.
TASKS, LONG_TASKS = Series(8, 4), Series(8, 1)
# Support or query rows of a rectangle's longest task, values of a history: what varies most. Up to
# 16 by twos, as many data sets have 10 query rows for every task.
ROWS = Series(8, 4, fine=16)
# Unique rows, and values of multi-id features: rows that pad cost memory alone.
FETCHED, VALUES = Series(4096, 1), Series(1024, 1)
