"""Inputs of the trees: statistics of a query row's columns and of its task's support rows.

- the task: its support rows, their mean label and deviation, the task's bias (bias_model.py)
- each sparse column: the mean label of training rows with its value; the support rows with the same
  value, and how far these lie above what their items alone predict; of the item its training rows
- each dense column as it is
- where the dataset has events, how many the row knows (of the newest); of each of their columns,
  how many have the row's value, and how many events ago the newest of these was
- where a run has neighbours, what its support rows say of them (data/features/neighbours.py)
Shape suffixes: T tasks, N rows, V values, K dense columns, X all inputs side by side"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gmeta.config.inputs import LabelPrior, NeighboursConfig
from gmeta.data.features.neighbours import (
    NAMES,
    RatedRows,
    find_neighbours_column,
    make_neighbour_features,
)
from gmeta.data.neighbour_counts import Baskets, NeighbourLists, count_neighbours
from gmeta.data.sums import NUM_FOLDS, sum_of_sharing
from gmeta.evaluation.baselines.bias_model import BiasModel, base_output, to_predictions
from gmeta.evaluation.baselines.episode_rows import (
    NO_ITEM,
    Bools,
    EpisodeRows,
    Floats,
    IdLists,
    make_lists,
)
from gmeta.evaluation.baselines.training_sums import NO_FOLD, TrainingSums, assign_folds
from metaio.format.features import Features
from metaio.ragged import Int64, places

# Rows of the overall mean that count towards a value's mean, and rows of 0 towards a shared
# value's: a single row is mostly noise.
VALUE_PRIOR = 5.0
SHARED_PRIOR = 2.0
TASK_PRIOR = 3.0


@dataclass(frozen=True)
class TreeNeighbours:
    """The neighbours of a single-id column's values, by the folds of the trees."""

    column: int
    lists: NeighbourLists
    prior: LabelPrior

    @classmethod
    def count(
        cls,
        parts: Iterable[EpisodeRows],
        features: Features,
        config: NeighboursConfig,
        prior: LabelPrior,
        seed: int,
    ) -> "TreeNeighbours | None":
        """Return the neighbours over all rows; None: the config has none."""
        column = find_neighbours_column(config, features)
        if column is None:
            return None
        sizes = {table.name: table.num_rows for table in features.tables}
        baskets = [
            Baskets.of(
                np.diff(rows.row_offsets_T1),
                rows.ids_of(column),
                (rows.label_N - prior.mean) / prior.deviation,
                assign_folds(rows.task_T, seed),
            )
            for rows in parts
        ]
        lists = NeighbourLists.make_on_disk(
            NUM_FOLDS, sizes[features.single[column].table], config.count
        )
        count_neighbours(Baskets.join(baskets), lists)
        return cls(column, lists, prior)

    def make_columns(
        self, rows: EpisodeRows, fold_N: Int64, hidden_N: Bools, above_N: Floats
    ) -> dict[str, Floats]:
        """Return the statistics by name; `above_N` are labels of support rows above their items."""
        support_N, episode_N = rows.is_support_N, rows.episode_N
        residual_N, num_tasks = above_N / self.prior.deviation, len(rows.task_T)
        count_T = np.bincount(episode_N, support_N, num_tasks)
        mean_T = np.bincount(episode_N, residual_N, num_tasks) / (count_T + TASK_PRIOR)
        item_N = np.where(hidden_N, 0, rows.ids_of(self.column))
        is_positive_N = support_N & (rows.label_N > self.prior.mean)
        mean_N, count_N = mean_T[episode_N], count_T[episode_N].astype(float)
        rated = RatedRows(episode_N, item_N, support_N, residual_N, is_positive_N, mean_N, count_N)
        # NO_FOLD is the last level: all tasks.
        return dict(zip(NAMES, make_neighbour_features(self.lists, fold_N, rated), strict=True))


@dataclass(frozen=True)
class Statistics:
    """The statistics of query rows, the bias model's outputs (log-odds for bce), and the labels."""

    values_NX: Floats
    start_N: Floats
    label_N: Floats
    names: tuple[str, ...]


@dataclass(frozen=True)
class StatisticsMaker:
    """Makes statistics from the training sums; columns in `follows_item` follow from the item."""

    sums: TrainingSums
    features: Features
    bias: BiasModel
    follows_item: tuple[bool, ...]
    neighbours: TreeNeighbours | None = None

    def make_statistics(
        self, rows: EpisodeRows, fold_N: Int64, unseen_N: Bools | None = None
    ) -> Statistics:
        """Return the statistics of the query rows; `fold_N` is each row's fold, or NO_FOLD."""
        bias, mean = self.bias, self.sums.mean
        query_N = ~rows.is_support_N
        # A query row in `unseen_N` is treated as one of a new item.
        hidden_N = np.zeros(rows.num_rows, np.bool_) if unseen_N is None else unseen_N & query_N
        level_N = bias.without_task(self.sums, rows.ids_of(bias.item), fold_N)
        level_N = np.where(hidden_N, base_output(bias.loss, mean), level_N)
        effect_N = bias.fit_task_effects(level_N, rows)[rows.episode_N]
        # Query rows count as 0 here, so that no label of theirs is an input.
        above_N = np.where(query_N, 0.0, rows.label_N - to_predictions(bias.loss, level_N))
        columns = _make_task_columns(rows) | {"task bias": effect_N}
        item_counts_N, item_label_sums_N = self._find_item_sums(rows, fold_N, hidden_N)
        for index, (feature, column) in enumerate(
            zip(self.features.sparse, self.sums.columns, strict=True)
        ):
            lists = make_lists(rows, index)
            # Of folds other than the task's: leaving out one row alone would give its label away,
            # as what is missing from the mean of two values is the label.
            counts_V, sums_V = column.leave_fold_out(lists.ids_V, fold_N[lists.row_V])
            # A genre of a new item has the mean of the genre's other items: rows of the item itself
            # are taken out, as a cold item has none.
            if self.follows_item[index]:
                counts_V = counts_V - item_counts_N[lists.row_V]
                sums_V = sums_V - item_label_sums_N[lists.row_V]
            columns[f"{feature.name}: mean"] = _average_lists(lists, counts_V, sums_V, mean)
            if index == bias.item:
                # New tasks have the numbers of all folds, which these are scaled up to.
                lacks_fold_V = fold_N[lists.row_V] != NO_FOLD
                scale_V = np.where(lacks_fold_V, NUM_FOLDS / (NUM_FOLDS - 1), 1.0)
                columns[f"{feature.name}: rows"] = scale_V * counts_V
            columns |= _count_shared_values(feature.name, lists, rows, above_N)
        for name, dense_N in zip(self.features.dense, rows.dense_NK.T, strict=True):
            columns[f"{name} (dense)"] = dense_N.astype(np.float64)
        columns |= make_recency_columns(rows, self.features)
        if self.neighbours is not None:
            columns |= self.neighbours.make_columns(rows, fold_N, hidden_N, above_N)
        values_NX = np.stack([column_N[query_N] for column_N in columns.values()], axis=1)
        start_N = (level_N + effect_N)[query_N]
        return Statistics(values_NX, start_N, rows.label_N[query_N], tuple(columns))

    def _find_item_sums(
        self, rows: EpisodeRows, fold_N: Int64, hidden_N: Bools
    ) -> tuple[Floats, Floats]:
        """Return rows and label sum of the item of each hidden row, 0 for other rows."""
        if self.bias.item == NO_ITEM:
            return np.zeros(rows.num_rows), np.zeros(rows.num_rows)
        column = self.sums.columns[self.bias.item]
        counts_N, sums_N = column.leave_fold_out(rows.ids_of(self.bias.item), fold_N)
        return np.where(hidden_N, counts_N, 0.0), np.where(hidden_N, sums_N, 0.0)


def _make_task_columns(rows: EpisodeRows) -> dict[str, Floats]:
    """Return count, mean and deviation of each task's support labels; NaN where there are none."""
    support_N, episode_N = rows.is_support_N, rows.episode_N
    num_episodes = len(rows.task_T)

    def total(values_N: Floats) -> Floats:
        sums_T = np.bincount(episode_N[support_N], values_N[support_N], minlength=num_episodes)
        return sums_T.astype(np.float64)

    count_T = total(np.ones(rows.num_rows))
    # 0 / 0 is NaN: of a task without support rows nothing is known.
    with np.errstate(invalid="ignore"):
        mean_T = total(rows.label_N) / count_T
        variance_T = total(np.square(rows.label_N - mean_T[episode_N])) / count_T
    return {
        "support rows": count_T[episode_N],
        "support mean": mean_T[episode_N],
        "support deviation": np.sqrt(variance_T)[episode_N],
    }


def make_recency_columns(rows: EpisodeRows, features: Features) -> dict[str, Floats]:
    """Return what the order of a row's newest events says; NaN: none of them has the value."""
    columns: dict[str, Floats] = {}
    events = zip(features.events, features.event_targets, rows.known_events, strict=True)
    for feature, target, lists in events:
        length_N = np.diff(lists.offsets_N1)
        columns["known events"] = length_N.astype(np.float64)
        is_same_V = lists.ids_V == rows.ids_of(target)[lists.row_V]
        row_V = lists.row_V[is_same_V]
        ago_V = (np.repeat(length_N, length_N) - places(length_N))[is_same_V]
        ago_N = np.full(rows.num_rows, np.nan)
        ago_N[row_V] = ago_V  # of equal rows the last stands, its newest event
        columns[f"{feature.name}: same"] = np.bincount(row_V, minlength=rows.num_rows).astype(float)
        columns[f"{feature.name}: events ago"] = ago_N
    return columns


def _average_lists(lists: IdLists, counts_V: Floats, sums_V: Floats, mean: float) -> Floats:
    """Return the mean over each row's ids of their smoothed mean labels; NaN for an empty list."""
    mean_V = (sums_V + VALUE_PRIOR * mean) / (np.maximum(counts_V, 0.0) + VALUE_PRIOR)
    lengths_N = np.diff(lists.offsets_N1)
    with np.errstate(invalid="ignore"):
        means: Floats = np.bincount(lists.row_V, mean_V, minlength=len(lengths_N)) / lengths_N
    return means


def _count_shared_values(
    name: str, lists: IdLists, rows: EpisodeRows, above_N: Floats
) -> dict[str, Floats]:
    """Return how many support rows share a row's values, and how far these lie above average."""
    if not len(lists.ids_V):
        zeros_N = np.zeros(rows.num_rows)
        return {f"{name}: shared": zeros_N, f"{name}: shared mean": zeros_N}
    row_V = lists.row_V
    id_V = np.unique(lists.ids_V, return_inverse=True)[1]
    # (episode, value) as one integer, made dense twice, so that the counts fit into an array.
    key_V = rows.episode_N[row_V] * (int(id_V.max()) + 1) + id_V
    pair_V = np.unique(key_V, return_inverse=True)[1]
    entries = row_V, pair_V, int(pair_V.max()) + 1
    count_N = sum_of_sharing(rows.is_support_N.astype(np.float64), *entries)
    sum_N = sum_of_sharing(above_N, *entries)
    return {f"{name}: shared": count_N, f"{name}: shared mean": sum_N / (count_N + SHARED_PRIOR)}
