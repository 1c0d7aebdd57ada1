"""Sums that the learner's statistics and the trees' are both made of: over training rows fold by
fold, and over the support rows of a task that share a value with a row.

Shape suffixes: K folds, V values of a column, N rows, E (row, id) pairs of the column, P distinct
(task, id) pairs; 2: number, sum of labels.
"""

import numpy as np
import numpy.typing as npt

from metaio.ragged import Int64

Floats = npt.NDArray[np.float64]

NUM_FOLDS = 5


def add_to_folds(sums_by_fold: Floats, fold_E: Int64, id_E: Int64, label_E: Floats) -> None:
    """Add labels, each in its fold, to the sums of the ids that they stand beside."""
    # Only the values that occur: a table may have far more rows than a batch.
    distinct, index_E = np.unique(fold_E * sums_by_fold.shape[1] + id_E, return_inverse=True)
    flat_X2 = sums_by_fold.reshape(-1, 2)
    flat_X2[distinct, 0] += np.bincount(index_E)
    flat_X2[distinct, 1] += np.bincount(index_E, label_E)


def sum_of_sharing(value_N: Floats, row_E: Int64, pair_E: Int64, num_pairs: int) -> Floats:
    """Return the sum over the other rows that share a row's (task, id) pairs, a row once for each
    id; rows that count for nobody, as query rows, hold 0."""
    value_E = value_N[row_E]
    others_E = np.bincount(pair_E, value_E, num_pairs)[pair_E] - value_E
    return np.bincount(row_E, others_E, len(value_N)).astype(np.float64)


def log_odds(share: float | Floats) -> Floats:
    """Return log(p / (1 - p)) of shares of clicks, finite for none and for all of them."""
    inside = np.clip(share, 1e-6, 1.0 - 1e-6)
    found: Floats = np.log(inside / (1.0 - inside))
    return found
