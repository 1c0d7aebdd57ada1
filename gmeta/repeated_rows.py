"""Which rows several ranks ask for, so that they take one optimizer step and not several.

Shape suffixes: N rows of all parts (rows may repeat), A places of rows that stand again later, C
distinct rows of these, R rows of all tables.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Marks for so many rows of the tables take no more memory than one row that is asked for, 32 wide.
MARKS_OF_A_ROW = 32


@final
class RepeatedRows:
    """Finds the places of rows below `num_rows` that stand more than once."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        # The last place of a row is written before it is read, whatever stands here.
        self._last_R: npt.NDArray[np.int32] | None = None

    def places(self, parts: Sequence[Ints]) -> tuple[Ints, Ints]:
        """In parts that are not empty, one behind the other: the places of rows that stand again
        later, ascending, and the last place of each of these rows.
        """
        # Every rank asks for the ids of a batch of one block in order.
        in_order = all((part[1:] > part[:-1]).all() for part in parts)
        if in_order and len(parts) == 1:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        num_places = sum(part.size for part in parts)
        if in_order and self._num_rows > MARKS_OF_A_ROW * num_places:
            return _places_in_order(parts)
        if self._last_R is None:
            self._last_R = np.empty(self._num_rows, np.int32)
        rows_N = np.concatenate(parts)
        places_N = np.arange(num_places, dtype=np.int32)
        self._last_R[rows_N] = places_N
        last_N = self._last_R.take(rows_N)
        again_A = np.flatnonzero(last_N != places_N)
        return again_A, last_N.take(again_A).astype(np.int64)


def _places_in_order(parts: Sequence[Ints]) -> tuple[Ints, Ints]:
    """The same where the rows of every part ascend, by merging them, without memory of all rows of
    the tables; where few rows stand again it takes no longer.
    """
    merged_N = np.sort(np.concatenate(parts), kind="stable")  # merges runs
    row_C = np.unique(merged_N[1:][merged_N[1:] == merged_N[:-1]])
    last_C = np.full(row_C.size, -1)
    found, start = [], 0
    for part in parts:
        at_C = np.searchsorted(part, row_C)
        is_here_C = part[np.minimum(at_C, part.size - 1)] == row_C
        place_C = start + at_C
        last_C[is_here_C] = place_C[is_here_C]
        found.append((np.flatnonzero(is_here_C), place_C[is_here_C]))
        start += part.size
    row_of_A, place_A = (np.concatenate(values) for values in zip(*found, strict=True))
    is_again_A = last_C[row_of_A] != place_A
    return place_A[is_again_A], last_C[row_of_A[is_again_A]]
