"""What the support rows of a row's neighbours say, as dense inputs of any model and of the trees.

With u the `together` and w the `alike` weight (neighbour_counts.py) of the items of a row and of
a support row, r the support row's label above what its item predicts, m the mean of r over the
task's n support rows, and sums over support rows,

    asinh 3 * sum w (r - m) / (sum |w| + 1/2)       asinh 3 * sum |w|
    asinh 10 * sum u / sqrt(n)                      asinh 10 * sum u (r - m) / sqrt(n)

and the third of support rows with labels above the mean of all labels, and of the others. All are
0 where no support row has a neighbour. A support row's own group (row_groups.py) is left out.

Shape suffixes: T tasks, N rows, F single-id or pooled features, H longest list or task, P task-row
pairs, S support rows, U unique ids, R rows of tables"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gmeta.data.neighbour_counts import Baskets, NeighbourLists
from gmeta.data.sums import NUM_FOLDS, find_folds, find_folds_N

if TYPE_CHECKING:
    import numpy.typing as npt

    from gmeta.config.inputs import LabelPrior, NeighboursConfig
    from gmeta.data.sums import Floats
    from metaio.format.features import Features
    from metaio.ragged import Int64
    from metaio.read.batch import TaskBatch

NAMES = ("alike mean", "alike", "together", "together sum", "together above", "together below")
# In a checkpoint 8 GiB, on disk while training six times as much.
MOST_NEIGHBOURS = 1 << 30
_SCALE = (3.0, 3.0, 10.0, 10.0, 10.0, 10.0)


class RatedRows(NamedTuple):
    """Rows with what their tasks' support rows say: labels above what their items predict, 0 of
    query rows; for each row mean and number of these over its task's other support rows."""

    task_N: Int64
    item_N: Int64
    is_support_N: npt.NDArray[np.bool_]
    residual_N: Floats
    is_positive_N: npt.NDArray[np.bool_]
    mean_N: Floats
    count_N: Floats
    group_N: Int64 | None = None  # what a support row leaves out of itself; None: its item alone


def find_neighbours_column(config: NeighboursConfig, features: Features) -> int | None:
    """Return the place of the config's single-id column; None: it has none. Raises ValueError: the
    dataset lacks it."""
    if not config.column:
        return None
    names = [column.name for column in features.single]
    if config.column not in names:
        raise ValueError(
            f"neighbours.column = {config.column!r} is no single-id column: this dataset has "
            f'{", ".join(names) or "none"}. Name one of them, or none at all: ""'
        )
    return names.index(config.column)


def make_neighbour_features(lists: NeighbourLists, level_N: Int64, rows: RatedRows) -> list[Floats]:
    """Return each feature [N] of the rows, by the lists of their level."""
    sums = _sum_near(lists, level_N, rows)
    if rows.group_N is not None:
        own = _sum_near(lists, level_N, rows._replace(task_N=rows.group_N))
        sums = [sum_N - own_N for sum_N, own_N in zip(sums, own, strict=True)]
    alike_N, alike_above_N, size_N, together_N, together_above_N, positive_N = sums
    above_N = alike_above_N - rows.mean_N * alike_N
    together_above_N = together_above_N - rows.mean_N * together_N
    root_N = np.sqrt(np.maximum(rows.count_N, 1.0))
    sums = [together_N, together_above_N, positive_N, together_N - positive_N]
    shown = above_N / (size_N + 0.5), size_N, *(sum_N / root_N for sum_N in sums)
    return [np.arcsinh(scale * one_N) for scale, one_N in zip(_SCALE, shown, strict=True)]


def _sum_near(lists: NeighbourLists, level_N: Int64, rows: RatedRows) -> list[Floats]:
    """Return sums over the support rows of each row's task with a neighbour of its item: alike,
    alike r, |alike|, together, together r, and together of the positives."""
    num_items = lists.ids.shape[1]
    key_N = rows.task_N * num_items + rows.item_N
    support = np.flatnonzero(rows.is_support_N & (rows.item_N != 0))
    key_S, place_S = np.unique(key_N[support], return_inverse=True)
    values = np.ones(len(key_N)), rows.residual_N, rows.is_positive_N.astype(float)
    count_S, residual_S, positive_S = (
        np.bincount(place_S, value_N[support], len(key_S)) for value_N in values
    )
    # Rows of a task with the same item have the same neighbours. An item is none of its own: so no
    # support row meets its own label.
    key_P, first_P, pair_N = np.unique(key_N, return_index=True, return_inverse=True)
    level_P, item_P = level_N[first_P], rows.item_N[first_P]
    # Most neighbours are in no support row at all: they are left out before tasks are compared.
    is_there_R = np.zeros(num_items, np.bool_)
    is_there_R[rows.item_N[support]] = True
    ids_PH = lists.ids[level_P, item_P]
    pair, place = np.nonzero(is_there_R[ids_PH])
    key = key_P[pair] + ids_PH[pair, place] - item_P[pair]
    found = np.minimum(np.searchsorted(key_S, key), max(len(key_S) - 1, 0))
    is_near = key_S[found] == key if len(key_S) else np.zeros(0, np.bool_)
    pair, place, found = pair[is_near], place[is_near], found[is_near]
    weights_2 = lists.weights[level_P[pair], item_P[pair], place].astype(float)

    def add(value: Floats) -> Floats:
        sums_N: Floats = np.bincount(pair, value, len(key_P))[pair_N].astype(float)
        return sums_N

    together, alike = weights_2.T
    weighted = (
        (alike, count_S), (alike, residual_S), (np.abs(alike), count_S),
        (together, count_S), (together, residual_S), (together, positive_S),
    )  # fmt: skip
    return [add(weight * of_S[found]) for weight, of_S in weighted]


class Neighbours(nn.Module):
    """The neighbours of a column's values, as counted over training tasks. Raises ValueError: the
    config names no single-id column, or asks for too many."""

    ids_RH: Tensor
    weights_RH2: Tensor

    def __init__(self, config: NeighboursConfig, features: Features, prior: LabelPrior) -> None:
        super().__init__()
        place = find_neighbours_column(config, features)
        assert place is not None
        self._place, self._prior = place, prior
        self.table = features.single[place].table
        (num_items,) = (one.num_rows for one in features.tables if one.name == self.table)
        if num_items * config.count > MOST_NEIGHBOURS:
            raise ValueError(
                f"neighbours.count = {config.count:,} of {num_items:,} rows of table {self.table}: "
                f"at most {MOST_NEIGHBOURS:,} in all are allowed. Lower it, or leave the column out"
            )
        # In buffers, as the statistics of items: of all tasks. Those without a fold are made anew.
        self.register_buffer("ids_RH", torch.zeros(num_items, config.count, dtype=torch.int32))
        weights_RH2 = torch.zeros(num_items, config.count, 2, dtype=torch.float16)
        self.register_buffer("weights_RH2", weights_RH2)
        self._by_fold: NeighbourLists | None = None
        self._on_host: NeighbourLists | None = None
        self.register_load_state_dict_post_hook(lambda module, _: module.drop_host_copies())

    def drop_host_copies(self) -> None:
        """Forget the host's copies of the buffers, which may hold other values now."""
        self._on_host = None

    def make_baskets(self, batch: TaskBatch) -> Baskets:
        """Return the items of the batch's tasks, support and query."""
        lengths_T = np.diff(batch.row_offsets_T1.numpy())
        label_N = (
            batch.label_N.numpy().astype(np.float64) - self._prior.mean
        ) / self._prior.deviation
        item_N, fold_T = find_ids_N(batch, self._place), find_folds(batch.task_T.numpy())
        return Baskets.of(lengths_T, item_N, label_N, fold_T)

    def make_lists(self) -> NeighbourLists:
        """Return empty lists, for `count_neighbours` to fill and `set_lists` to take."""
        return NeighbourLists.make_on_disk(NUM_FOLDS, *self.ids_RH.shape)

    def set_lists(self, lists: NeighbourLists) -> None:
        """Take the lists without each fold, and of all tasks those of the items that have any."""
        self._by_fold = lists
        # Along a stream an item keeps its neighbours until an increment brings it again.
        is_there_R = torch.from_numpy(lists.ids[-1, :, 0] != 0)
        for buffer, values in ((self.ids_RH, lists.ids), (self.weights_RH2, lists.weights)):
            buffer[is_there_R] = torch.from_numpy(values[-1])[is_there_R].to(buffer.device)
        self.drop_host_copies()

    def forget(self, rows: Int64 | None) -> None:
        """Take these values, which mean others from now on, out of all lists."""
        if rows is not None and len(rows):
            is_gone_RH = torch.isin(self.ids_RH, torch.from_numpy(rows).to(self.ids_RH))
            self.ids_RH[is_gone_RH] = 0
            self.weights_RH2[is_gone_RH] = 0.0
            self.drop_host_copies()

    def fold_lists(self) -> NeighbourLists:
        """Return the lists for training rows. Raises ValueError: none were counted yet."""
        if self._by_fold is None:
            raise ValueError("neighbours were not counted over training rows")
        return self._by_fold

    def lists(self) -> NeighbourLists:
        """Return the lists for rows to predict, of one level."""
        if self._on_host is None:
            ids_RH, weights_RH2 = self.ids_RH.cpu().numpy(), self.weights_RH2.cpu().numpy()
            self._on_host = NeighbourLists(ids_RH[None], weights_RH2[None])
        return self._on_host


def find_ids_N(batch: TaskBatch, place: int) -> Int64:
    """Return each row's id in a single-id column."""
    ids_N: Int64 = batch.unique_ids_U.numpy()[batch.positions_NF[:, place].numpy()]
    return ids_N


def find_levels_N(lists: NeighbourLists, batch: TaskBatch) -> Int64:
    """Return the level of the lists that each row of a batch sees: without its task's fold."""
    if len(lists.ids) == 1:
        return np.zeros(batch.num_rows, np.int64)
    return find_folds_N(batch.task_T.numpy(), batch.row_offsets_T1.numpy())
