"""Statistics of training rows as dense inputs of any model: mean label and number of the training
rows that have a row's value, such as its item.

With S the sum of n labels, a the shrinkage, mu and sigma mean and deviation of all labels,

    mean    (S - n mu) / sigma / (n + a)          number    log(1 + n) / log(1 + 100)

or, with item_features.log_odds, logit((S + a mu) / (n + a)) - logit(mu) for the mean: both are 0
for a value without training rows and for unknown ids. For a training row S and n are of the folds
that its task is not in; in the number, n is scaled up to the rows of all folds. A multi-id column
has the means over its known ids. The 2 of a suffix: mean and number.

Shape suffixes: T tasks, N rows, H longest list or task, F single-id or pooled features, M multi-id
features, V values, K dense columns, U unique ids, R rows of tables"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gmeta.config.inputs import choose_columns
from gmeta.data.sums import NUM_FOLDS, Floats, add_to_folds, find_folds_N, log_odds, scale_count
from metaio.format.block import find_features_of_values
from metaio.format.features import OOV_ROW
from metaio.ragged import Int64, owners, sum_rows

if TYPE_CHECKING:
    from gmeta.config.inputs import ItemFeaturesConfig
    from metaio.format.features import Features
    from metaio.read.batch import TaskBatch

# A rank that trains keeps 48 bytes a value and for a while 80 more, a checkpoint 8: at most 1 GiB.
MOST_VALUES = 1 << 23


class _Column(NamedTuple):
    is_multi: bool
    place: int
    table: str
    num_values: int


@dataclass(frozen=True)
class ItemSums:
    """Sums of the labels of training rows by fold: of all rows (number, sum, sum of squares), and
    of each column's values (number, sum). Sums of several ranks can be added."""

    total_by_fold: Floats
    columns: tuple[Floats, ...]  # of each [folds, R, 2]


class ItemStatistics(nn.Module):
    """The statistics of training rows that a learner takes. Raises ValueError: a pattern of
    `columns` matches no sparse column, or a table is too large."""

    def __init__(self, config: ItemFeaturesConfig, features: Features) -> None:
        super().__init__()
        names = [column.name for column in features.sparse]
        chosen = choose_columns("item_features.columns", config.columns, names)
        sizes = {table.name: table.num_rows for table in features.tables}
        num_single, columns = len(features.single), []
        for index in np.flatnonzero(chosen).tolist():
            table = features.sparse[index].table
            num_values = sizes[table]
            if num_values > MOST_VALUES:
                raise ValueError(
                    f"item_features.columns: {names[index]} has a table of {num_values:,} rows; at "
                    f"most {MOST_VALUES:,} are allowed. Leave the column out"
                )
            is_multi = index >= num_single
            columns.append(_Column(is_multi, index - num_single * is_multi, table, num_values))
        self._columns = tuple(columns)
        self._shrinkage, self._log_odds = config.shrinkage, config.log_odds
        for index, column in enumerate(columns):
            self.register_buffer(_buffer(index), torch.zeros(column.num_values, 2))
        # The statistics of all rows lie in buffers: checkpoints and exports keep them with the
        # model. Those without a fold are needed to train alone, and made anew from the dataset.
        self._without_fold: list[npt.NDArray[np.float32]] | None = None  # of each [folds, R, 2]
        self._on_host: list[npt.NDArray[Any]] | None = None
        self.register_load_state_dict_post_hook(lambda module, _: module.drop_host_copies())

    @property
    def width(self) -> int:
        """Return the number of statistics of a row."""
        return 2 * len(self._columns)

    @property
    def reads_lists(self) -> bool:
        """Return whether multi-id columns have statistics."""
        return any(column.is_multi for column in self._columns)

    def table_buffers(self) -> list[tuple[str, Tensor]]:
        """Return each column's table and the buffer that has a row for each of its rows."""
        return [
            (column.table, self.get_buffer(_buffer(index)))
            for index, column in enumerate(self._columns)
        ]

    def drop_host_copies(self) -> None:
        """Forget the host's copies of the buffers, which may hold other values now."""
        self._on_host = None

    def empty_sums(self) -> ItemSums:
        """Return the sums of no rows."""
        of_columns = [np.zeros((NUM_FOLDS, column.num_values, 2)) for column in self._columns]
        return ItemSums(np.zeros((NUM_FOLDS, 3)), tuple(of_columns))

    def add(self, sums: ItemSums, batch: TaskBatch) -> None:
        """Add all rows of a batch, support and query, to `sums`."""
        label_N = batch.label_N.numpy().astype(np.float64)
        fold_N = find_folds_N(batch.task_T.numpy(), batch.row_offsets_T1.numpy())
        for place, values_N in enumerate((np.ones_like(label_N), label_N, label_N**2)):
            sums.total_by_fold[:, place] += np.bincount(fold_N, values_N, NUM_FOLDS)
        for column, by_fold in zip(self._columns, sums.columns, strict=True):
            row_V, id_V = _entries(batch, column)
            add_to_folds(by_fold, fold_N[row_V], id_V, label_N[row_V])

    def set_from_sums(self, sums: ItemSums) -> None:
        """Set the statistics from the sums over the whole training split."""
        levels = [self._means_without_fold(sums, fold) for fold in range(NUM_FOLDS)]
        self._without_fold = [np.stack(of_column) for of_column in zip(*levels, strict=True)]
        for index, values_R2 in enumerate(self._means_without_fold(sums, None)):
            self.get_buffer(_buffer(index)).copy_(torch.from_numpy(values_R2))
        self.drop_host_copies()

    def with_features(self, batch: TaskBatch) -> TaskBatch:
        """Return a batch to predict with the statistics of each row behind its dense columns."""
        found = []
        for index, column in enumerate(self._columns):
            row_V, id_V = _entries(batch, column)
            found.append(_means_N2(row_V, id_V, self._values_R2(index)[id_V], batch.num_rows))
        return _append_features(batch, found)

    def fold_statistics(self) -> FoldStatistics:
        """Return the statistics for training rows. Raises ValueError: there are no sums yet."""
        if self._without_fold is None:
            raise ValueError("the statistics of items were not taken from training rows")
        return FoldStatistics(self._columns, self._without_fold)

    def features_of_ids(self, ids_NF: Tensor, ids_NMH: Tensor, lengths_NM: Tensor) -> Tensor:
        """Return the statistics of rows to predict [N, width]; their lists are padded alike."""
        found = []
        # In tensors alone, as an exported program needs it.
        for index, column in enumerate(self._columns):
            values_R2 = self.get_buffer(_buffer(index))
            if not column.is_multi:
                found.append(values_R2[ids_NF[:, column.place]])
                continue
            ids_NH, length_N = ids_NMH[:, column.place], lengths_NM[:, column.place]
            places_H = torch.arange(ids_NH.shape[1], device=ids_NH.device)
            is_known_NH = (places_H < length_N.unsqueeze(1)) & (ids_NH != OOV_ROW)
            sums_N2 = (values_R2[ids_NH] * is_known_NH.unsqueeze(2)).sum(dim=1)
            found.append(sums_N2 / is_known_NH.sum(dim=1, keepdim=True).clamp(min=1))
        return torch.cat(found, dim=1)

    def _means_without_fold(
        self, sums: ItemSums, fold: int | None
    ) -> list[npt.NDArray[np.float32]]:
        others = [other for other in range(NUM_FOLDS) if other != fold]
        # Added up without the fold, not subtracted: no bit may tell of the rows that are left out.
        count, total, squares = sums.total_by_fold[others].sum(axis=0)
        mean = total / max(count, 1.0)
        # New tasks have the numbers of all folds: a model of smaller ones would be wrong on them.
        scale = sums.total_by_fold[:, 0].sum() / max(count, 1.0)
        variance = squares / max(count, 1.0) - mean**2
        # Labels that are all alike differ from their mean by rounding alone.
        deviation = np.sqrt(variance) if variance > 1e-12 * mean**2 else 1.0
        found = []
        for by_fold in sums.columns:
            count_R, sum_R = by_fold[others].sum(axis=0).T
            above_R = (sum_R - count_R * mean) / deviation
            # What no row has is 0, without shrinkage too.
            weight_R = np.maximum(count_R + self._shrinkage, 1e-12)
            mean_R = above_R / weight_R
            if self._log_odds:
                # From the same sums: a value that no row has is the mean itself.
                mean_R = log_odds(mean + mean_R * deviation) - log_odds(mean)
            values_R2 = np.stack([mean_R, scale_count(scale * count_R)], axis=1).astype(np.float32)
            values_R2[OOV_ROW] = 0.0
            found.append(values_R2)
        return found

    def _values_R2(self, index: int) -> npt.NDArray[Any]:
        values = self.get_buffer(_buffer(index))
        if values.device.type == "cpu":
            shared: npt.NDArray[Any] = values.numpy()
            return shared
        if self._on_host is None:
            buffers = (self.get_buffer(_buffer(at)) for at in range(len(self._columns)))
            self._on_host = [buffer.cpu().numpy() for buffer in buffers]
        return self._on_host[index]


@dataclass(frozen=True)
class FoldStatistics:
    """The statistics of training rows: of the rows in other folds than a row's task."""

    # To leave out the row alone would give its label away: among the rows of one item, those with a
    # label of 1 would all have a smaller mean than those with a label of 0. So all rows of a task
    # see the other folds, mu and sigma included, as if the task were new.
    columns: tuple[_Column, ...]
    without_fold: list[npt.NDArray[np.float32]]  # of each [folds, R, 2]

    def with_features(self, batch: TaskBatch) -> TaskBatch:
        """Return the batch with these statistics of each row behind its dense columns."""
        fold_N, found = find_folds_N(batch.task_T.numpy(), batch.row_offsets_T1.numpy()), []
        for column, by_fold in zip(self.columns, self.without_fold, strict=True):
            row_V, id_V = _entries(batch, column)
            values_V2 = by_fold[fold_N[row_V], id_V]
            found.append(_means_N2(row_V, id_V, values_V2, batch.num_rows))
        return _append_features(batch, found)


def _append_features(batch: TaskBatch, found: list[npt.NDArray[np.float32]]) -> TaskBatch:
    of_rows = torch.from_numpy(np.concatenate(found, axis=1)).to(batch.dense_NK.dtype)
    return replace(batch, dense_NK=torch.cat([batch.dense_NK, of_rows], dim=1))


def _buffer(index: int) -> str:
    return f"column_{index}"


def _entries(batch: TaskBatch, column: _Column) -> tuple[Int64, Int64]:
    unique_U = batch.unique_ids_U.numpy()
    if not column.is_multi:
        return np.arange(batch.num_rows), unique_U[batch.positions_NF[:, column.place].numpy()]
    lengths_NM = batch.multi_lengths_NM.numpy()
    mine_V = find_features_of_values(lengths_NM) == column.place
    return owners(sum_rows(lengths_NM))[mine_V], unique_U[batch.multi_positions_V.numpy()[mine_V]]


def _means_N2(
    row_V: Int64, id_V: Int64, values_V2: npt.NDArray[Any], num_rows: int
) -> npt.NDArray[np.float32]:
    # Unknown ids hold 0: only the divisor must leave them out.
    known_N = np.bincount(row_V, id_V != OOV_ROW, num_rows)
    sums = [np.bincount(row_V, values_V2[:, place], num_rows) for place in range(2)]
    means: npt.NDArray[np.float32] = (
        np.stack(sums, axis=1) / np.maximum(known_N, 1.0)[:, None]
    ).astype(np.float32)
    return means
