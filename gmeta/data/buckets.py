"""Sizes rounded up to few, so that the batches of a ragged run have few shapes: a CUDA graph is
captured once for each (cuda_graphs.py), and torch's allocator reuses its blocks.

Padding rows, tasks and entries are in no sum: they cost time, and change no loss beyond rounding. A
size goes up to the next of a geometric series, never below its least: small sizes cost nothing."""

from typing import NamedTuple

import numpy as np

from metaio.ragged import Int64

# Shares of a batch's tasks, the shortest first, in front of each cut between two rectangles; the
# LONGEST tasks stand behind one more. At the same places in every batch: the best places differ
# from batch to batch, and would give each a shape of its own.
CUTS, CUTS_OF_MANY, MANY_TASKS = (0.75,), (0.5, 0.75, 0.9375), 512
LONGEST = 8


def choose_cuts(num_tasks: int) -> list[int]:
    """Return where `num_tasks` tasks, the shortest first, are cut into rectangles: ascending
    places, the last of which is the end.

    >>> choose_cuts(128), choose_cuts(1024), choose_cuts(8)
    ([96, 120, 128], [512, 768, 960, 1016, 1024], [6, 8])"""
    shares = CUTS if num_tasks < MANY_TASKS else CUTS_OF_MANY
    places = [int(num_tasks * share) for share in shares]
    return sorted({*places, max(num_tasks - LONGEST, places[-1]), num_tasks})


class SizeSeries(NamedTuple):
    """The allowed sizes: from `least` on, `steps` of them between two powers of two; beyond `fine`,
    itself a power of two, the powers alone."""

    least: int
    steps: int
    fine: int = 1 << 62

    def round_up(self, size: int) -> int:
        """Return the smallest allowed size that is large enough."""
        return int(self.round_up_all(np.array([size]))[0])

    def round_up_all(self, sizes: Int64) -> Int64:
        """Return the smallest allowed sizes that are large enough; 0 for 0."""
        at_least = np.maximum(sizes, self.least)
        # frexp is exact: 2 ** (power - 1) is the power of two below a size, or half of it itself.
        _, power = np.frexp(at_least - 1)
        steps = np.where(at_least > self.fine, 1, self.steps)
        step = np.maximum((1 << np.maximum(power.astype(np.int64) - 1, 0)) // steps, 1)
        rounded: Int64 = np.where(sizes == 0, 0, -(-at_least // step) * step)
        return rounded


# A rank has about as many tasks in every step, so finer steps add no shapes.
TASKS = SizeSeries(8, 4)
# Support or query rows of a rectangle's longest task: up to 16 by twos, as many data sets have 10
# query rows for every task. The last two rectangles and histories vary most: powers of two.
ROWS, ROWS_OF_LONG = SizeSeries(8, 4, fine=32), SizeSeries(8, 4, fine=16)
# Unique rows, and values of multi-id features: padding rows cost memory alone.
FETCHED, VALUES = SizeSeries(4096, 1), SizeSeries(1024, 1)
# Events of a task, and its rows where these are read.
EVENTS = SizeSeries(16, 1)
