"""Which rows several ranks ask for, so that they take one optimizer step and not several.

Shape suffixes: N rows of all parts (rows may repeat), A places of rows that stand again later, R
rows of all tables.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def ascend(rows_N: Ints) -> bool:
    """Whether each row is above the one before."""
    return bool((rows_N[1:] > rows_N[:-1]).all())


@final
class RepeatedRows:
    """Finds the places of rows below `num_rows` that stand more than once."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        # Whether a row stands later, for rows in order: a byte each, all False between two calls.
        self._is_later_R: npt.NDArray[np.bool_] | None = None
        # The last place of a row, for others: written before it is read, whatever stands here.
        self._last_R: npt.NDArray[np.int32] | None = None

    def places(self, parts: Sequence[Ints], ascend: bool) -> tuple[Ints, Ints]:
        """In parts that are not empty, one behind the other: the places of rows that stand again
        later, ascending, and the last place of each of these rows. Whether the rows of every part
        `ascend`, as in what ranks ask for with batches of one block, changes only the time.
        """
        if ascend:
            return self._places_in_order(parts)
        if self._last_R is None:
            self._last_R = np.empty(self._num_rows, np.int32)
        rows_N = np.concatenate(parts)
        places_N = np.arange(rows_N.size, dtype=np.int32)
        self._last_R[rows_N] = places_N
        last_N = self._last_R.take(rows_N)
        again_A = np.flatnonzero(last_N != places_N)
        return again_A, last_N.take(again_A).astype(np.int64)

    def _places_in_order(self, parts: Sequence[Ints]) -> tuple[Ints, Ints]:
        """The same where the rows of every part ascend: no part has a row twice, and only rows that
        stand again are searched for. A quarter of the memory, in half of the time.
        """
        if self._is_later_R is None:
            self._is_later_R = np.zeros(self._num_rows, bool)
        starts = [0, *accumulate(part.size for part in parts)]
        again, last = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for index in reversed(range(len(parts) - 1)):
            self._is_later_R[parts[index + 1]] = True
            part = parts[index]
            at = np.flatnonzero(self._is_later_R.take(part))
            again.insert(0, starts[index] + at)
            last.insert(0, _last_places(part.take(at), parts[index + 1 :], starts[index + 1 :]))
        for part in parts[1:]:
            self._is_later_R[part] = False
        return np.concatenate(again), np.concatenate(last)


def _last_places(rows: Ints, parts: Sequence[Ints], starts: Sequence[int]) -> Ints:
    """Where rows stand in the last of these ascending parts that has them; each is in one."""
    if len(parts) == 1:
        return starts[0] + np.searchsorted(parts[0], rows)
    found = np.full(rows.size, -1)
    for part, start in zip(parts, starts, strict=False):
        at = np.searchsorted(part, rows)
        is_here = part.take(at, mode="clip") == rows
        found[is_here] = start + at[is_here]
    return found
