"""Sums that both the learner's statistics and the boosted trees are made of.

Shape suffixes: T tasks, N rows, V values"""

import numpy as np
import numpy.typing as npt

from metaio.hashing import splitmix64
from metaio.ragged import Int64

Floats = npt.NDArray[np.float64]

NUM_FOLDS = 5
_SALT = np.uint64(0x17E3)


def find_folds(task_T: Int64) -> Int64:
    """Return the fold of each task, from 0 to NUM_FOLDS - 1, by a hash of its id."""
    mixed_T = splitmix64(task_T.astype(np.uint64) ^ _SALT)
    return (mixed_T % np.uint64(NUM_FOLDS)).astype(np.int64)


def find_folds_N(task_T: Int64, row_offsets_T1: Int64) -> Int64:
    """Return the fold of each row's task, see find_folds."""
    return np.repeat(find_folds(task_T), np.diff(row_offsets_T1))


def add_to_folds(sums_by_fold: Floats, fold_V: Int64, id_V: Int64, label_V: Floats) -> None:
    """Add labels, each in its fold, to the number and sum of labels of each id."""
    # Only the values that occur: a table may have far more rows than a batch.
    distinct, index_V = np.unique(fold_V * sums_by_fold.shape[1] + id_V, return_inverse=True)
    flat = sums_by_fold.reshape(-1, 2)
    flat[distinct, 0] += np.bincount(index_V)
    flat[distinct, 1] += np.bincount(index_V, label_V)


def sum_of_sharing(
    value_N: Floats, row_V: Int64, pair_V: Int64, num_pairs: int, group_N: Int64 | None = None
) -> Floats:
    """Return the sum over the other rows that share a row's (task, id) pairs, once for each id;
    with `group_N` over the rows of other groups."""
    # Rows that must not count, such as query rows, hold 0.
    value_V = own_V = value_N[row_V]
    if group_N is not None:
        key_V = np.unique(group_N[row_V] * num_pairs + pair_V, return_inverse=True)[1]
        own_V = np.bincount(key_V, value_V)[key_V].astype(float)
    others_V = np.bincount(pair_V, value_V, num_pairs)[pair_V] - own_V
    return np.bincount(row_V, others_V, len(value_N)).astype(np.float64)


def scale_count(count_N: Floats) -> Floats:
    """Return log(1 + n) / log(1 + 100), of the size of other inputs: 0 for 0, 1 for a hundred."""
    scaled_N: Floats = np.log1p(count_N) / np.log1p(100.0)
    return scaled_N


def log_odds(share: float | Floats) -> Floats:
    """Return log(p / (1 - p)) of shares of clicks, finite for none and for all of them."""
    inside = np.clip(share, 1e-6, 1.0 - 1e-6)
    found: Floats = np.log(inside / (1.0 - inside))
    return found
