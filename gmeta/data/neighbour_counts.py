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
from typing import IO, Any

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
_LEVELS = [[other for other in range(NUM_FOLDS) if other != fold] for fold in range(NUM_FOLDS)]
_LEVELS.append(list(range(NUM_FOLDS)))


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
        shape = len(_LEVELS), num_items, most
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
    place_N, above_N = baskets.item_N * np.int64(NUM_FOLDS) + fold_N, baskets.above_N.astype(float)
    values = np.ones(len(above_N)), above_N, above_N**2
    sums = [np.bincount(place_N, value_N, num_items * NUM_FOLDS) for value_N in values]
    sums_by_fold = np.stack(sums, axis=1).reshape(num_items, NUM_FOLDS, 3)
    mine_N = np.flatnonzero(baskets.item_N % num_parts == part)
    order_N = mine_N[np.argsort(baskets.item_N[mine_N], kind="stable")]
    for one_P, other_P, pairs_by_fold in _count_pairs(
        baskets, fold_N, order_N, num_items, pairs_at_once
    ):
        of_one, of_other = sums_by_fold[one_P], sums_by_fold[other_P]
        for level, folds in enumerate(_LEVELS):
            added = (each[:, folds].sum(axis=1) for each in (of_one, of_other, pairs_by_fold))
            weights_P2 = _weigh(*added).astype(np.float16)
            # By the stored numbers, so that equal pairs are equal in whatever order they are added.
            score_P = np.abs(weights_P2.astype(np.float32)).sum(axis=1)
            near_P = np.flatnonzero(score_P > 0)
            # Pairs are in ascending order, in which equally near ones stay.
            downward_P = np.int64(1 << 32) - score_P[near_P].view(np.int32)
            order_P = near_P[np.argsort((one_P[near_P] << 33) + downward_P, kind="stable")]
            starts_P = np.flatnonzero(np.diff(one_P[order_P], prepend=-1))
            lengths = np.diff(starts_P, append=len(order_P))
            place_P = np.arange(len(order_P)) - np.repeat(starts_P, lengths)
            order_P, place_P = order_P[place_P < most], place_P[place_P < most]
            lists.ids[level, one_P[order_P], place_P] = other_P[order_P]
            lists.weights[level, one_P[order_P], place_P] = weights_P2[order_P]


def _weigh(one_P3: Floats, other_P3: Floats, pairs_P4: Floats) -> Floats:
    """Return both weights of pairs: from tasks, sum and squares of each, and what both share."""
    count_P, sum_P, other_sum_P, product_P = pairs_P4.T
    means, norms = [], []
    for count_of_P, sum_of_P, square_of_P in (one_P3.T, other_P3.T):
        mean_P = sum_of_P / (count_of_P + _ITEM_PRIOR)
        means.append(mean_P)
        norms.append(np.maximum(square_of_P + mean_P * (count_of_P * mean_P - 2 * sum_of_P), 0.0))
    alike_P = product_P - means[0] * other_sum_P - means[1] * sum_P + means[0] * means[1] * count_P
    both_P = np.sqrt(one_P3[:, 0] * other_P3[:, 0])
    weights = (
        count_P / (both_P + _TOGETHER_PRIOR),
        alike_P / (np.sqrt(norms[0] * norms[1]) + _ALIKE_PRIOR),
    )
    return np.stack(weights, axis=1)


def _count_pairs(
    baskets: Baskets, fold_N: Int64, order_N: Int64, num_items: int, pairs_at_once: int
) -> Iterator[tuple[Int64, Int64, Floats]]:
    """Yield pairs of an item and another in ascending order, all of an item at once, and by fold
    [P, folds, 4] the tasks that have both, sums of their z, and of the products of these."""
    task_N = owners(np.diff(baskets.offsets_T1))
    length_N = np.diff(baskets.offsets_T1)[task_N[order_N]]
    targets = np.arange(pairs_at_once, int(length_N.sum()), pairs_at_once)
    cuts = np.unique([0, *np.searchsorted(np.cumsum(length_N), targets), len(order_N)])
    open_P, open_sums = np.zeros(0, np.int64), np.zeros((0, NUM_FOLDS, 4))
    for begin, end in pairwise(cuts.tolist()):
        rows, lengths = order_N[begin:end], length_N[begin:end]
        one, other = (
            np.repeat(rows, lengths),
            ragged_indices(baskets.offsets_T1[task_N[rows]], lengths),
        )
        one, other = one[one != other], other[one != other]
        key = baskets.item_N[one] * np.int64(num_items) + baskets.item_N[other]
        # What the item before left open belongs to the first of these.
        pair_P, place = np.unique(np.concatenate([open_P, key]), return_inverse=True)
        at = place[len(open_P) :] * NUM_FOLDS + fold_N[one]
        above, above_other = (baskets.above_N[each].astype(float) for each in (one, other))
        values = np.ones(len(one)), above, above_other, above * above_other
        sums = [np.bincount(at, value, len(pair_P) * NUM_FOLDS) for value in values]
        sums_by_fold: Floats = np.stack(sums, axis=1).reshape(-1, NUM_FOLDS, 4).astype(float)
        sums_by_fold[place[: len(open_P)]] += open_sums
        done = len(pair_P)
        if end < len(order_N):
            next_item = np.int64(baskets.item_N[order_N[end]])
            done = int(np.searchsorted(pair_P, next_item * num_items))
        yield *np.divmod(pair_P[:done], num_items), sums_by_fold[:done]
        open_P, open_sums = pair_P[done:], sums_by_fold[done:]
