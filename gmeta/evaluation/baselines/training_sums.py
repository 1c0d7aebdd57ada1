"""How many training rows hold each value of a column, and the sum of their labels, fold by fold.

The training split is read once, a block at a time. A fold holds the tasks of one fifth: what a row
of it is predicted from comes from the other four, as a new task knows nothing of itself.

Shape suffixes: T tasks, N rows, F single-id or pooled features, V values.
"""

import numpy as np
from collections.abc import Iterable
from dataclasses import dataclass
from gmeta.evaluation.baselines.episode_rows import (EpisodeRows, FOLD_STREAM, Floats, hash_uniform)
from metaio.format.features import Features
from metaio.ragged import Int64


NUM_FOLDS = 5
NO_FOLD = -1  # of rows that the sums know nothing of: nothing is left out
# Beyond it, values of a large table share a place by their remainder.
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class ColumnSums:
    """Of one column: rows and label sum of each value in each fold."""

    count_by_fold: Floats
    sum_by_fold: Floats

    @property
    def num_values(self) -> int:
        """Return how many values it tells apart."""
        return int(self.count_by_fold.shape[1])

    def find_places(self, ids: Int64) -> Int64:
        """Return the column of the sums for each id."""
        return ids % self.num_values

    def leave_fold_out(self, ids: Int64, fold: Int64) -> tuple[Floats, Floats]:
        """Return rows and label sum of each id in all folds but its own (NO_FOLD: in all)."""
        place = self.find_places(ids)
        counts = self.count_by_fold.sum(axis=0)[place]
        sums = self.sum_by_fold.sum(axis=0)[place]
        in_fold = fold != NO_FOLD
        counts -= np.where(in_fold, self.count_by_fold[fold, place], 0.0)
        sums -= np.where(in_fold, self.sum_by_fold[fold, place], 0.0)
        return counts, sums


@dataclass(frozen=True)
class TrainingSums:
    """Of all sparse columns, in the order of Features.sparse; and of all rows."""

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
    """Return the sums over all rows, support and query."""
    sizes = {table.name: table.num_rows for table in features.tables}
    most = max(1, max_bytes // (16 * NUM_FOLDS * max(len(features.sparse), 1)))
    shapes = [(NUM_FOLDS, min(sizes[feature.table], most)) for feature in features.sparse]
    columns = tuple(ColumnSums(np.zeros(shape), np.zeros(shape)) for shape in shapes)
    num_rows, label_sum = 0, 0.0
    for rows in parts:
        num_rows += rows.num_rows
        label_sum += float(rows.label_N.sum())
        fold_N = assign_folds(rows.task_T, seed)[rows.episode_N]
        for column, ids_N in zip(columns, rows.ids_NF.T, strict=False):
            _add_to_sums(column, ids_N, fold_N, rows.label_N)
        for column, lists in zip(columns[len(features.single) :], rows.multi, strict=True):
            row_V = lists.row_V
            _add_to_sums(column, lists.ids_V, fold_N[row_V], rows.label_N[row_V])
    return TrainingSums(columns, num_rows, label_sum)


def _add_to_sums(column: ColumnSums, ids: Int64, fold: Int64, label: Floats) -> None:
    place = fold * column.num_values + column.find_places(ids)
    # Only the values that occur: a table may have far more rows than the block.
    distinct, index = np.unique(place, return_inverse=True)
    column.count_by_fold.ravel()[distinct] += np.bincount(index)
    column.sum_by_fold.ravel()[distinct] += np.bincount(index, label)
