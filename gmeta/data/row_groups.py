"""Rows that belong together: a positive and the negatives that were drawn for it.

Shape suffixes: T tasks, N rows"""

import numpy as np

from metaio.ragged import Int64
from metaio.read.batch import TaskBatch


def find_groups(batch: TaskBatch) -> Int64:
    """Return the group of each row, from 0 on: a group begins with each label above 0, each task
    and each side. Labels of query rows may be unknown."""
    begins_N = (batch.label_N > 0).numpy()
    starts_T = batch.row_offsets_T1[:-1]
    # Sides without rows begin where the next one does, or behind the last row.
    starts = np.concatenate([starts_T, starts_T + batch.support_lengths_T])
    begins_N[starts[starts < len(begins_N)]] = True
    return np.cumsum(begins_N) - 1
