"""Tasks of similar size in groups, so that few of their rows pad. T tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaio.ragged import Int64

# One more rectangle costs about 0.1 ms a step in calls on a CPU (18 at one inner step and three
# layers), as much as padding rows do in every product.
MOST_RECTANGLES = 8
PADDING_SHARE = 0.1
# What one more rectangle costs, on CUDA 18 launches an inner step, in rows of padding times weights
# of layers. Estimated, from 5 us a launch and 60 TFLOP/s: docs/gpu.md.
RECTANGLE_WORK = {"cpu": 0, "cuda": 300_000_000}
# One more group of the general loop costs the calls of all its passes: 5.5 ms at one inner step of
# a DLRM on a CPU; on CUDA the launches, estimated likewise.
GROUP_WORK = {"cpu": 50_000_000, "cuda": 5_000_000_000}


class TaskGroup(NamedTuple):
    """Tasks of similar size, and the rows of the longest, or more."""

    tasks: Int64  # -1: one without rows, that pads
    support_rows: int
    query_rows: int

    @property
    def num_rows(self) -> int:
        """Return the rows of both sides, padding included."""
        return len(self.tasks) * (self.support_rows + self.query_rows)


def group_tasks(support_T: Int64, query_T: Int64, least_gain: float = 1) -> list[Int64]:
    """Return the indices of tasks in groups of similar size.

    The group that gains most is cut in two, by support or by query rows, until padding rows are at
    most PADDING_SHARE of the true ones, there are MOST_RECTANGLES groups or a cut saves fewer than
    `least_gain` rows.

    >>> groups = group_tasks(np.array([9, 2, 9, 2]), np.array([5, 5, 5, 5]))
    >>> [group.tolist() for group in groups]
    [[1, 3], [0, 2]]"""
    if not len(support_T):
        return []
    groups = [_SizeGroup.of(np.arange(len(support_T)), support_T, query_T)]
    allowed = (1 + PADDING_SHARE) * (support_T.sum() + query_T.sum())
    while len(groups) < MOST_RECTANGLES and sum(group.cost for group in groups) > allowed:
        best = max(groups, key=lambda group: group.gain)
        if best.gain < least_gain:
            break
        groups.remove(best)
        groups += [_SizeGroup.of(half, support_T, query_T) for half in best.halves]
    return [group.tasks for group in groups]


def least_gain(work: Mapping[str, int], device: str, num_weights: int) -> float:
    """Return the rows that a cut must save on this device to be worth its calls."""
    # A padding row costs as many multiply-adds as the layers that adapt have weights.
    return max(1.0, work[device] / max(num_weights, 1))


@dataclass(frozen=True, eq=False)
class _SizeGroup:
    tasks: Int64
    cost: int  # rows with padding
    gain: int  # by cutting the tasks into `halves`
    halves: tuple[Int64, ...]

    @classmethod
    def of(cls, tasks: Int64, support_T: Int64, query_T: Int64) -> _SizeGroup:
        cost, gain = len(tasks) * int(support_T[tasks].max() + query_T[tasks].max()), 0
        halves: tuple[Int64, ...] = ()
        counts = np.arange(1, len(tasks) + 1)
        for key_T, other_T in ((support_T, query_T), (query_T, support_T)):
            key = key_T[tasks]
            order = np.argsort(key, kind="stable")
            key = key[order]
            if key[0] == key[-1]:
                continue  # all equal: a cut by the other side is as good
            other = other_T[tasks[order]]
            # Rows with padding: of the first task, the first two, ...; of the last, the last two.
            head = (key + np.maximum.accumulate(other)) * counts
            tail = (key[-1] + np.maximum.accumulate(other[::-1])) * counts
            halved = head[:-1] + tail[-2::-1]
            cut = int(halved.argmin())
            if cost - halved[cut] > gain:
                gain = int(cost - halved[cut])
                halves = tasks[order[: cut + 1]], tasks[order[cut + 1 :]]
        return cls(tasks, cost, gain, halves)
