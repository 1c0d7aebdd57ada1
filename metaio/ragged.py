"""Ragged arrays: lists of different lengths end to end, told apart by lengths or offsets."""

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
    result = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def ragged_indices(starts_E: Int64, lengths_E: Int64) -> Int64:
    """Return the indices of the concatenated ranges [start, start + length).

    >>> ragged_indices(np.array([7, 2]), np.array([2, 3])).tolist()
    [7, 8, 2, 3, 4]
    """
    ends_E = np.cumsum(lengths_E)
    total = int(ends_E[-1]) if len(ends_E) else 0
    shifts: Int64 = np.repeat(starts_E - (ends_E - lengths_E), lengths_E)
    return np.arange(total, dtype=np.int64) + shifts


def row_sums(lengths_NM: Int32) -> Int64:
    """Return the sum of each row [N]: how many ids a row has in all its lists."""
    # Column by column: numpy takes ten times as long to sum along an axis of two or three.
    total_N = np.zeros(len(lengths_NM), dtype=np.int64)
    for index in range(lengths_NM.shape[1]):
        total_N += lengths_NM[:, index]
    return total_N
