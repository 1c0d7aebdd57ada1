"""Ragged arrays: lists of different lengths, stored end to end, with their lengths or offsets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer[Any]]


def offsets(lengths: npt.ArrayLike) -> Int64:
    """Return exclusive prefix sums with the total appended: lengths [n] to offsets [n + 1]."""
    lengths = np.asarray(lengths)
    # Always int64: lengths may be int32, whose running sum would overflow in a large split.
    result = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def ragged_indices(starts_C: Int64, lengths_C: Int64) -> Int64:
    """Return the indices of the concatenated ranges [start, start + length).

    >>> ragged_indices(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]"""
    ends_C = np.cumsum(lengths_C)
    total = int(ends_C[-1]) if len(ends_C) else 0
    shifts: Int64 = np.repeat(starts_C - (ends_C - lengths_C), lengths_C)
    return np.arange(total, dtype=np.int64) + shifts


def index_entries(offsets_N1: Int64, chosen_C: Int64) -> Int64:
    """Return the indices of the entries of the chosen lists, list after list.

    >>> index_entries(np.array([0, 2, 2, 5]), np.array([2, 0])).tolist()
    [2, 3, 4, 0, 1]"""
    starts_C = offsets_N1[chosen_C]
    return ragged_indices(starts_C, offsets_N1[chosen_C + 1] - starts_C)


def reorder_row_by_row(lengths_NM: npt.NDArray[np.integer[Any]], columns: Sequence[Ids]) -> Int64:
    """Return the ids of multi-id features, given column by column, in stored order: row by row."""
    # Lengths alone place every list: row-major, a list starts where those before it end.
    starts_NM = offsets(lengths_NM.ravel())[:-1].reshape(lengths_NM.shape)
    values_V = np.empty(sum(len(column) for column in columns), np.int64)
    for index, column in enumerate(columns):
        values_V[ragged_indices(starts_NM[:, index], lengths_NM[:, index].astype(np.int64))] = (
            column
        )
    return values_V


def owners(lengths: npt.ArrayLike) -> Int64:
    """Return which list each entry stands in.

    >>> owners([2, 0, 3]).tolist()
    [0, 0, 2, 2, 2]"""
    lengths = np.asarray(lengths, np.int64)
    return np.repeat(np.arange(len(lengths)), lengths)


def places(lengths: npt.ArrayLike) -> Int64:
    """Return the place of each entry in its list.

    >>> places([2, 0, 3]).tolist()
    [0, 1, 0, 1, 2]"""
    lengths = np.asarray(lengths, np.int64)
    ends = offsets(lengths)
    found: Int64 = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return found


def find_firsts(lengths: npt.ArrayLike, counts: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return a mask of the first entries of each list, of as many as `counts` says.

    >>> find_firsts([2, 0, 3], [1, 0, 2]).tolist()
    [True, False, True, True, False]"""
    return places(lengths) < np.repeat(np.asarray(counts), np.asarray(lengths, np.int64))


def find_run_starts(keys_N: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows that differ from the one before: where runs of equal keys begin.

    >>> find_run_starts(np.array([7, 7, 2])).tolist()
    [True, False, True]"""
    # The first row begins a run, where there is a first row.
    return np.concatenate([np.ones(min(len(keys_N), 1), np.bool_), keys_N[1:] != keys_N[:-1]])


def sum_rows(lengths_NM: Int32) -> Int64:
    """Return the sum of each row [N]: how many ids a row has in all its lists."""
    # Column by column: numpy takes ten times as long to sum along an axis of two or three.
    total_N = np.zeros(len(lengths_NM), dtype=np.int64)
    for index in range(lengths_NM.shape[1]):
        total_N += lengths_NM[:, index]
    return total_N
