"""Sums of the training split: rows and labels of each value of a column, in each fold of tasks.
Shape suffixes: T tasks, N rows, F single-id or pooled features, V values"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gmeta.data.sums import NUM_FOLDS, add_to_folds
from gmeta.evaluation.baselines.episode_rows import (
    FOLD_STREAM,
    EpisodeRows,
    Floats,
    hash_uniform,
    make_lists,
)
from metaio.format.features import Features
from metaio.ragged import Int64

# The fold of rows that the sums do not contain: nothing is left out for them.
NO_FOLD = -1
# Above this size values of a large table share a place, by their remainder.
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class ColumnSums:
    """Rows and label sum of each value of one column, by fold."""

    sums_by_fold: Floats

    def leave_fold_out(self, ids_N: Int64, fold_N: Int64) -> tuple[Floats, Floats]:
        """Return rows and label sum of each id in all folds but its row's (NO_FOLD: in all)."""
        place_N = ids_N % self.sums_by_fold.shape[1]
        sums_N2 = self.sums_by_fold.sum(axis=0)[place_N]
        # A row is predicted without the tasks of its fold, as a new task knows nothing of itself.
        sums_N2 -= np.where(fold_N[:, None] != NO_FOLD, self.sums_by_fold[fold_N, place_N], 0.0)
        return sums_N2[:, 0], sums_N2[:, 1]


@dataclass(frozen=True)
class TrainingSums:
    """The sums of all sparse columns, in the order of Features.sparse, and of all rows."""

    columns: tuple[ColumnSums, ...]
    num_rows: int
    label_sum: float

    @property
    def mean(self) -> float:
        """Return the mean label of the training split."""
        return self.label_sum / self.num_rows


def assign_folds(task_T: Int64, seed: int) -> Int64:
    """Return each task's fold: 0 to NUM_FOLDS - 1."""
    return (hash_uniform(task_T, FOLD_STREAM, seed) * NUM_FOLDS).astype(np.int64)


def sum_training_rows(
    parts: Iterable[EpisodeRows], features: Features, seed: int, max_bytes: int = MAX_BYTES
) -> TrainingSums:
    """Return the sums over all rows, support and query, read a part at a time."""
    sizes = {table.name: table.num_rows for table in features.tables}
    # 16 bytes a value: rows and label sum as float64.
    most = max(1, max_bytes // (16 * NUM_FOLDS * max(len(features.sparse), 1)))
    shapes = [(NUM_FOLDS, min(sizes[feature.table], most), 2) for feature in features.sparse]
    columns = tuple(ColumnSums(np.zeros(shape)) for shape in shapes)
    num_rows, label_sum = 0, 0.0
    for rows in parts:
        num_rows += rows.num_rows
        label_sum += float(rows.label_N.sum())
        fold_N = assign_folds(rows.task_T, seed)[rows.episode_N]
        for index, column in enumerate(columns):
            lists, num_values = make_lists(rows, index), column.sums_by_fold.shape[1]
            fold_V, label_V = fold_N[lists.row_V], rows.label_N[lists.row_V]
            add_to_folds(column.sums_by_fold, fold_V, lists.ids_V % num_values, label_V)
    return TrainingSums(columns, num_rows, label_sum)
