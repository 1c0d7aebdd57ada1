"""Counts which items occur together in tasks and how alike tasks judge them, in bounded memory.

With z a row's label above its task's mean (shrunken to that of all rows), n the tasks that have an
item and r = z minus the item's mean of z, items i and j have two weights,

    together  n_ij / (sqrt(n_i n_j) + 5)      alike  sum r_i r_j / (sqrt(sum r_i^2 sum r_j^2) + 3)

An item's neighbours are the others of which together + |alike| is largest. Every fold of tasks has
neighbours for which none of its own tasks counts: z is of a task alone, and sums over the other
folds are added up, never subtracted.

Shape suffixes: T tasks, N rows, H longest list, P pairs, R rows of tables"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gmeta.data.sums import NUM_FOLDS, Floats
from metaio.ragged import Float32, Int64, offsets, owners, ragged_indices

# Rows of the mean of all that a task's mean and an item's count besides; and see above.
_TASK_PRIOR, _ITEM_PRIOR, _TOGETHER_PRIOR, _ALIKE_PRIOR = 3.0, 5.0, 5.0, 3.0
# A task's newest items, of which pairs are made: 40,000 pairs a task.
MOST_ITEMS = 200
# Each takes some 400 bytes while it is counted.
PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Baskets:
    """The items of tasks, each once in a task, and how far their labels lie above the task's."""

    offsets_T1: Int64
    fold_T: npt.NDArray[np.int8]
    item_N: npt.NDArray[np.int32]
    above_N: Float32

    @classmethod
    def of(cls, lengths_T: Int64, item_N: Int64, label_N: Floats, fold_T: Int64) -> "Baskets":
        """Return the baskets of rows, task by task, the newest last, with labels above the mean of
        all in units of their deviation; an item of 0 is none."""
        task_N = owners(lengths_T)
        sum_T = np.bincount(task_N, label_N, len(lengths_T))
        above_N = label_N - (sum_T / (lengths_T + _TASK_PRIOR))[task_N]
        # Of an item that a task has twice the newest row: found first from the end.
        key_N = task_N * (int(item_N.max(initial=0)) + 1) + item_N
        newest = len(key_N) - 1 - np.unique(key_N[::-1], return_index=True)[1]
        newest = np.sort(newest[item_N[newest] != 0])
        found_T = np.bincount(task_N[newest], minlength=len(lengths_T))
        kept_T = np.minimum(found_T, MOST_ITEMS)
        kept = newest[ragged_indices(offsets(found_T)[1:] - kept_T, kept_T)]
        items, above = item_N[kept].astype(np.int32), above_N[kept].astype(np.float32)
        return cls(offsets(kept_T), fold_T.astype(np.int8), items, above)

    @classmethod
    def join(cls, parts: Sequence["Baskets"]) -> "Baskets":
        """Return the baskets of all parts, of which there is at least one."""
        return cls(
            offsets(np.concatenate([np.diff(part.offsets_T1) for part in parts])),
            np.concatenate([part.fold_T for part in parts]),
            np.concatenate([part.item_N for part in parts]),
            np.concatenate([part.above_N for part in parts]),
        )


@dataclass(frozen=True)
class NeighbourLists:
    """Each item's neighbours, the nearest first, with both weights: of each level [levels, R, H].
    An item of 0 is none, and weighs 0."""

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float16]  # of each [levels, R, H, 2]
    file: IO[bytes] | None = None

    @classmethod
    def make_on_disk(cls, num_items: int, most: int) -> "NeighbourLists":
        """Return empty lists without each fold, then of all tasks, in a temporary file, mapped."""
        # Without a name: nothing is left of it, however this process ends.
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the maps need it
        shape = NUM_FOLDS + 1, num_items, most
        file.truncate(8 * max(int(np.prod(shape)), 1))
        return cls(*_map_lists(file, shape, "r+"), file)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is None:
            return NeighbourLists, (self.ids, self.weights)
        # A process beside this one maps the same file.
        path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        return _open_lists, (path, self.ids.shape)


def _open_lists(path: str, shape: tuple[int, ...]) -> NeighbourLists:
    with open(path, "rb") as file:
        return NeighbourLists(*_map_lists(file, shape, "r"))


def _map_lists(file: IO[bytes], shape: tuple[int, ...], mode: Any) -> tuple[Any, Any]:
    ids = np.memmap(file, np.int32, mode, 0, shape)
    return ids, np.memmap(file, np.float16, mode, ids.nbytes, (*shape, 2))


def count_neighbours(
    baskets: Baskets,
    lists: NeighbourLists,
    part: int = 0,
    num_parts: int = 1,
    pairs_at_once: int = PAIRS_AT_ONCE,
) -> None:
    """Fill the lists, without each fold's tasks and of all, of every `num_parts`-th item."""
    _, num_items, most = lists.ids.shape
    fold_N = np.repeat(baskets.fold_T.astype(np.int64), np.diff(baskets.offsets_T1))
    above_N = baskets.above_N.astype(float)
    values = np.ones(len(above_N)), above_N, above_N**2
    sums_of_items = _sum_by_fold(baskets.item_N, fold_N, values, num_items)
    items = [_ItemLevels.of(*sums) for sums in _leave_folds_out(sums_of_items)]
    mine_N = np.flatnonzero(baskets.item_N % num_parts == part)
    order_N = mine_N[np.argsort(baskets.item_N[mine_N], kind="stable")]
    for one_P, other_P, sums_of_pairs in _count_pairs(
        baskets, fold_N, order_N, num_items, pairs_at_once
    ):
        for level, sums in enumerate(_leave_folds_out(sums_of_pairs)):
            together_P, alike_P = items[level].weigh(one_P, other_P, *sums)
            # In fewer digits, so that equal pairs are equal in whatever order they are added.
            score_P = (together_P + np.abs(alike_P)).astype(np.float32)
            near_P = np.flatnonzero(score_P > 0)
            # Pairs are in ascending order, in which equally near ones stay.
            downward_P = np.int64(1 << 32) - score_P[near_P].view(np.int32)
            order_P = near_P[np.argsort((one_P[near_P] << 33) + downward_P, kind="stable")]
            starts_P = np.flatnonzero(np.diff(one_P[order_P], prepend=-1))
            lengths = np.diff(starts_P, append=len(order_P))
            place_P = np.arange(len(order_P)) - np.repeat(starts_P, lengths)
            order_P, place_P = order_P[place_P < most], place_P[place_P < most]
            lists.ids[level, one_P[order_P], place_P] = other_P[order_P]
            for weight, values_P in enumerate((together_P, alike_P)):
                lists.weights[level, one_P[order_P], place_P, weight] = values_P[order_P]


class _ItemLevels(NamedTuple):
    """What is known of each item alone: mean of z, and roots of its tasks and of its squares."""

    mean_R: Floats
    root_tasks_R: Floats
    root_squares_R: Floats

    @classmethod
    def of(cls, count_R: Floats, sum_R: Floats, square_R: Floats) -> "_ItemLevels":
        mean_R = sum_R / (count_R + _ITEM_PRIOR)
        squares_R = square_R + mean_R * (count_R * mean_R - 2 * sum_R)
        # Rounding may make it negative.
        return cls(mean_R, np.sqrt(count_R), np.sqrt(np.maximum(squares_R, 0.0)))

    def weigh(
        self,
        one_P: Int64,
        other_P: Int64,
        count_P: Floats,
        sum_P: Floats,
        other_sum_P: Floats,
        product_P: Floats,
    ) -> tuple[Floats, Floats]:
        (mean_P, tasks_P, squares_P), (other_mean_P, other_tasks_P, other_squares_P) = (
            [known_R[items_P] for known_R in self] for items_P in (one_P, other_P)
        )
        alike_P = product_P - mean_P * other_sum_P - other_mean_P * (sum_P - mean_P * count_P)
        return (
            count_P / (tasks_P * other_tasks_P + _TOGETHER_PRIOR),
            alike_P / (squares_P * other_squares_P + _ALIKE_PRIOR),
        )


def _sum_by_fold(
    place_N: npt.NDArray[np.integer[Any]], fold_N: Int64, values: Sequence[Floats], number: int
) -> Floats:
    """Return the sums of each value [values, folds, number] in its place."""
    at_N = fold_N * number + place_N
    sums = np.empty((len(values), NUM_FOLDS * number))
    for place, value_N in enumerate(values):
        sums[place] = np.bincount(at_N, value_N, NUM_FOLDS * number)
    return sums.reshape(len(values), NUM_FOLDS, number)


def _leave_folds_out(sums: Floats) -> Iterator[Floats]:
    """Yield sums [values, folds, ...] over the other folds of each, then over all."""
    # No number holds the fold that is left out, not even one that is taken away again.
    for fold in range(NUM_FOLDS + 1):
        first, *others = (sums[:, other] for other in range(NUM_FOLDS) if other != fold)
        total = first.copy()
        for each in others:
            total += each
        yield total


def _count_pairs(
    baskets: Baskets, fold_N: Int64, order_N: Int64, num_items: int, pairs_at_once: int
) -> Iterator[tuple[Int64, Int64, Floats]]:
    """Yield pairs of an item and another in ascending order, all of an item at once, and by fold
    [4, folds, P] the tasks that have both, sums of their z, and of the products of these."""
    task_N = owners(np.diff(baskets.offsets_T1))
    length_N = np.diff(baskets.offsets_T1)[task_N[order_N]]
    targets = np.arange(pairs_at_once, int(length_N.sum()), pairs_at_once)
    cuts = np.unique([0, *np.searchsorted(np.cumsum(length_N), targets), len(order_N)])
    open_P, open_sums = np.zeros(0, np.int64), np.zeros((4, NUM_FOLDS, 0))
    for begin, end in pairwise(cuts.tolist()):
        rows, lengths = order_N[begin:end], length_N[begin:end]
        one = np.repeat(rows, lengths)
        other = ragged_indices(baskets.offsets_T1[task_N[rows]], lengths)
        one, other = one[one != other], other[one != other]
        key = baskets.item_N[one] * np.int64(num_items) + baskets.item_N[other]
        # What the item before left open belongs to the first of these.
        pair_P, place = np.unique(np.concatenate([open_P, key]), return_inverse=True)
        above, above_other = (baskets.above_N[each].astype(float) for each in (one, other))
        values = np.ones(len(one)), above, above_other, above * above_other
        sums = _sum_by_fold(place[len(open_P) :], fold_N[one], values, len(pair_P))
        sums[:, :, place[: len(open_P)]] += open_sums
        done = len(pair_P)
        if end < len(order_N):
            next_item = np.int64(baskets.item_N[order_N[end]])
            done = int(np.searchsorted(pair_P, next_item * num_items))
        one_P, other_P = np.divmod(pair_P[:done], num_items)
        yield one_P, other_P, sums[:, :, :done]
        open_P, open_sums = pair_P[done:], sums[:, :, done:]
