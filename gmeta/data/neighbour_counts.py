"""Counts which items occur together in tasks and how alike tasks judge them, in bounded memory.

With z a row's label above its task's mean (shrunken to that of all rows), n the tasks that have an
item and r = z minus the item's mean of z, items i and j have two weights,

    together  n_ij / (sqrt(n_i n_j) + 5)      alike  sum r_i r_j / (sqrt(sum r_i^2 sum r_j^2) + 3)

An item's neighbours are the others of which together + |alike| is largest. Every fold of tasks has
neighbours for which none of its own tasks counts: z is of a task alone, and sums over the other
folds are added up, never subtracted.

Shape suffixes: T tasks, N rows, H longest list or task, V values, R rows of tables"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gmeta.errors import NotWrittenError
from metaio.ragged import find_run_starts, offsets, owners, places, ragged_indices

if TYPE_CHECKING:
    import numpy.typing as npt

    from gmeta.data.sums import Floats
    from metaio.ragged import Float32, Int64

# Rows of the mean of all that a task's mean and an item's count besides; and see above.
_TASK_PRIOR, _ITEM_PRIOR, _TOGETHER_PRIOR, _ALIKE_PRIOR = 3.0, 5.0, 5.0, 3.0
# A task's newest items, of which pairs are made: 40,000 pairs a task.
MOST_ITEMS = 200
# Each takes some 500 bytes while it is counted.
PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Baskets:
    """The items of tasks, each once in a task, and how far their labels lie above the task's."""

    offsets_T1: Int64
    fold_T: npt.NDArray[np.int8]
    item_N: npt.NDArray[np.int32]
    above_N: Float32

    @classmethod
    def of(cls, lengths_T: Int64, item_N: Int64, label_N: Floats, fold_T: Int64) -> Baskets:
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
    def join(cls, parts: Sequence[Baskets]) -> Baskets:
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
    def make_on_disk(cls, num_folds: int, num_items: int, most: int) -> NeighbourLists:
        """Return empty lists without each fold, then of all tasks, in a temporary file, mapped."""
        shape = num_folds + 1, num_items, most
        num_bytes, place = 8 * math.prod(shape), tempfile.gettempdir()
        try:
            # Without a name: nothing is left of it, however this process ends.
            file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115 - the maps need it
            # A disk that is full says so here: in a map it would end the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            raise NotWrittenError(
                f"neighbours need {num_bytes / 1e9:.2g} GB in {place}: {error.strerror}",
                "Set TMPDIR to a folder with room, or lower neighbours.count",
            ) from error
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
    num_levels, num_items, most = lists.ids.shape
    fold_N = np.repeat(baskets.fold_T.astype(np.int64), np.diff(baskets.offsets_T1))
    shape = num_levels - 1, num_items
    powers = [baskets.above_N.astype(float) ** power for power in range(3)]
    sums_of_items = _sum_by_fold(baskets.item_N, fold_N, powers, shape)
    items = [_ItemLevels.of(*sums) for sums in _leave_folds_out(sums_of_items)]
    del powers, sums_of_items  # there may be many
    order_N = np.flatnonzero(baskets.item_N % num_parts == part)
    order_N = order_N[np.argsort(baskets.item_N[order_N], kind="stable")]
    for one_V, other_V, sums_of_pairs in _count_pairs(
        baskets, fold_N, order_N, shape, pairs_at_once
    ):
        for level, sums in enumerate(_leave_folds_out(sums_of_pairs)):
            together_V, alike_V = items[level].weigh(one_V, other_V, *sums)
            # In fewer digits, so that equal pairs are equal in whatever order they are added.
            score_V = (together_V + np.abs(alike_V)).astype(np.float32)
            near_V = np.flatnonzero(score_V > 0)
            # Pairs are in ascending order, in which equally near ones stay.
            downward_V = np.int64(1 << 32) - score_V[near_V].view(np.int32)
            order_V = near_V[np.argsort((one_V[near_V] << 33) + downward_V, kind="stable")]
            starts = np.flatnonzero(find_run_starts(one_V[order_V]))
            place_V = places(np.diff(starts, append=len(order_V)))
            order_V, place_V = order_V[place_V < most], place_V[place_V < most]
            lists.ids[level, one_V[order_V], place_V] = other_V[order_V]
            for weight, values_V in enumerate((together_V, alike_V)):
                lists.weights[level, one_V[order_V], place_V, weight] = values_V[order_V]


class _ItemLevels(NamedTuple):
    """What is known of each item alone: mean of z, and roots of its tasks and of its squares."""

    mean_R: Floats
    root_tasks_R: Floats
    root_squares_R: Floats

    @classmethod
    def of(cls, count_R: Floats, sum_R: Floats, square_R: Floats) -> _ItemLevels:
        mean_R = sum_R / (count_R + _ITEM_PRIOR)
        squares_R = square_R + mean_R * (count_R * mean_R - 2 * sum_R)
        # Rounding may make it negative.
        return cls(mean_R, np.sqrt(count_R), np.sqrt(np.maximum(squares_R, 0.0)))

    def weigh(
        self,
        one_V: Int64,
        other_V: Int64,
        count_V: Floats,
        sum_V: Floats,
        other_sum_V: Floats,
        product_V: Floats,
    ) -> tuple[Floats, Floats]:
        (mean_V, tasks_V, squares_V), (other_mean_V, other_tasks_V, other_squares_V) = (
            [known_R[items_V] for known_R in self] for items_V in (one_V, other_V)
        )
        alike_V = product_V - mean_V * other_sum_V - other_mean_V * (sum_V - mean_V * count_V)
        return (
            count_V / (tasks_V * other_tasks_V + _TOGETHER_PRIOR),
            alike_V / (squares_V * other_squares_V + _ALIKE_PRIOR),
        )


def _sum_by_fold(
    place_N: npt.NDArray[np.integer[Any]],
    fold_N: Int64,
    values: Sequence[Floats],
    shape: tuple[int, int],
) -> Floats:
    """Return the sums of each value, by fold and place: [values, *shape]."""
    num_folds, number = shape
    at_N = fold_N * number + place_N
    sums = np.empty((len(values), num_folds * number))
    for place, value_N in enumerate(values):
        sums[place] = np.bincount(at_N, value_N, num_folds * number)
    return sums.reshape(len(values), *shape)


def _leave_folds_out(sums: Floats) -> Iterator[Floats]:
    """Yield sums [values, folds, ...] over the other folds of each, then over all."""
    # No number holds the fold that is left out, not even one that is taken away again.
    num_folds = sums.shape[1]
    for fold in range(num_folds + 1):
        first, *others = (sums[:, other] for other in range(num_folds) if other != fold)
        total = first.copy()
        for each in others:
            total += each
        yield total


def _count_pairs(
    baskets: Baskets, fold_N: Int64, order_N: Int64, shape: tuple[int, int], pairs_at_once: int
) -> Iterator[tuple[Int64, Int64, Floats]]:
    """Yield pairs [V] of an item and another in ascending order, all of an item at once; and by
    fold [4, folds, V] the tasks that have both, sums of their z, and of the products of these."""
    num_folds, num_items = shape
    task_N = owners(np.diff(baskets.offsets_T1))
    length_N = np.diff(baskets.offsets_T1)[task_N[order_N]]
    targets = np.arange(pairs_at_once, int(length_N.sum()), pairs_at_once)
    cuts = np.unique([0, *np.searchsorted(np.cumsum(length_N), targets), len(order_N)])
    open_V, open_sums = np.zeros(0, np.int64), np.zeros((4, num_folds, 0))
    for begin, end in pairwise(cuts.tolist()):
        rows, lengths = order_N[begin:end], length_N[begin:end]
        one = np.repeat(rows, lengths)
        other = ragged_indices(baskets.offsets_T1[task_N[rows]], lengths)
        one, other = one[one != other], other[one != other]
        key = baskets.item_N[one] * np.int64(num_items) + baskets.item_N[other]
        # What the item before left open belongs to the first of these, and comes first: sums are
        # the same to the bit wherever they are cut.
        key = np.concatenate([np.tile(open_V, num_folds), key])
        pair_V, place = np.unique(key, return_inverse=True)
        fold = np.concatenate([np.repeat(np.arange(num_folds), len(open_V)), fold_N[one]])
        above, above_other = (baskets.above_N[each].astype(float) for each in (one, other))
        new = np.ones(len(one)), above, above_other, above * above_other
        values = [np.append(*of_both) for of_both in zip(open_sums, new, strict=True)]
        sums = _sum_by_fold(place, fold, values, (num_folds, len(pair_V)))
        done = len(pair_V)
        if end < len(order_N):
            next_item = np.int64(baskets.item_N[order_N[end]])
            done = int(np.searchsorted(pair_V, next_item * num_items))
        one_V, other_V = np.divmod(pair_V[:done], num_items)
        yield one_V, other_V, sums[:, :, :done]
        open_V, open_sums = pair_V[done:], sums[:, :, done:]
