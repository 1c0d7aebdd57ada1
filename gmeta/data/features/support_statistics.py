"""Statistics of a task's support rows as dense inputs of any model: the task's mean label, and that
of the support rows that share a value with the row.

Every mean is smoothed: with S the sum of n labels and a the shrinkage,

    mean of the task          m   = (S + a mu) / (n + a)             mu, sigma: the label prior
    spread of the task        s^2 = (sum (y - S / n)^2 + a sigma^2) / (n + a)
    mean of a shared value    m_v = (S_v + a m) / (n_v + a)          over the rows that share it

With `residual_of` a column that [item_features] has, y is the label minus that column's statistic,
so m is the task's effect as in a bias model. Where those statistics are log-odds of clicks, so is
m: with p the probability that they expect of each of the n rows, and P the sum of these,

    m = logit((S + a mu) / (n + a)) - logit((P + a mu) / (n + a))          0 of no rows

and all other statistics are of y - p.

No support row sees its own label, nor those of its group (row_groups.py): that has one positive, so
what the others lack would be the label.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, U unique ids, P task-row pairs"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gmeta.config.inputs import NO_PRIOR, LabelPrior, NeighboursConfig, choose_columns
from gmeta.data.features.neighbours import (
    NAMES,
    RatedRows,
    find_ids_N,
    find_levels_N,
    find_neighbours_column,
    make_neighbour_features,
)
from gmeta.data.row_groups import find_groups
from gmeta.data.sums import Floats, log_odds, scale_count, sum_of_sharing
from metaio.format.block import find_features_of_values
from metaio.format.features import OOV_ROW
from metaio.ragged import Int64, find_firsts, owners, sum_rows
from metaio.read.batch import deduplicate_task_rows

if TYPE_CHECKING:
    from gmeta.config.inputs import ItemFeaturesConfig, SupportFeaturesConfig
    from gmeta.data.neighbour_counts import NeighbourLists
    from metaio.format.features import Features
    from metaio.read.batch import TaskBatch, TaskRows


@dataclass(frozen=True)
class SupportStatistics:
    """The statistics that a learner takes, and how they are smoothed."""

    # All are in units of the prior's deviation: the task's mean minus the prior's, its spread minus
    # the prior's, a shared value's mean minus the task's. Each is 0 where nothing is known.
    of_task: bool
    single_columns: tuple[int, ...]  # places among the single-id features
    multi_columns: tuple[int, ...]  # and among the multi-id ones
    names: tuple[str, ...]  # of all statistics, in order
    prior_strength: float
    prior: LabelPrior
    expected_place: int | None = None  # place of the dense input that labels count from
    log_odds: bool = False  # that input and the task's mean are log-odds of clicks
    neighbours_column: int | None = None  # its place among the single-id features
    in_groups: bool = False  # a positive and the rows drawn for it are left out together

    @classmethod
    def of(
        cls,
        config: SupportFeaturesConfig,
        features: Features,
        prior: LabelPrior,
        items: ItemFeaturesConfig | None = None,
        neighbours: NeighboursConfig = NeighboursConfig(),  # noqa: B008 - frozen
    ) -> SupportStatistics:
        """Return the statistics of a config; those of `items` stand between them and the dense
        columns. Raises ValueError: a column that is named is not there, or changes nothing."""
        known = [column.name for column in features.sparse]
        chosen = choose_columns("support_features.columns", config.columns, known)
        num_single = len(features.single)
        # In the order in which `features_NK` puts the statistics side by side.
        names = ["task mean", "task count", "task spread"] if config.task else []
        for name, is_chosen in zip(known, chosen, strict=True):
            names += [f"{name} mean", f"{name} count"] if is_chosen else []
        place = find_neighbours_column(neighbours, features)
        if place is not None:
            names += [f"{features.single[place].name} {name}" for name in NAMES]
        return cls(
            config.task,
            tuple(np.flatnonzero(chosen[:num_single]).tolist()),
            tuple(np.flatnonzero(chosen[num_single:]).tolist()),
            tuple(names),
            config.shrinkage,
            prior,
            _find_expected_place(config, features, items) if config.residual_of else None,
            bool(config.residual_of and items is not None and items.log_odds),
            place,
            features.draws_negatives,
        )

    @property
    def width(self) -> int:
        """Return the number of statistics of a row."""
        return len(self.names)

    def with_features(self, batch: TaskBatch, lists: NeighbourLists | None = None) -> TaskBatch:
        """Return the batch with the statistics of each row behind its dense columns; `lists` are
        needed where neighbours are among them."""
        if not self.width:
            return batch
        of_rows = torch.from_numpy(self.features_NK(batch, lists)).to(batch.dense_NK.dtype)
        return replace(batch, dense_NK=torch.cat([batch.dense_NK, of_rows], dim=1))

    def features_NK(
        self, batch: TaskBatch, lists: NeighbourLists | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the statistics of every row of the batch, see with_features."""
        group_N = find_groups(batch) if self.in_groups else None
        labels, expected_N = _LabelRows.of(batch, self.prior, group_N), self._expected_N(batch)
        rows = labels.minus_expected(expected_N)
        tasks = rows.totals()
        mean_N = self._smooth(tasks.sum_N, tasks.count_N, np.zeros(len(tasks.sum_N)))
        found: list[Floats] = []
        if self.of_task:
            task_mean_N = self._log_odds_N(rows, tasks, expected_N) if self.log_odds else mean_N
            found += [task_mean_N, scale_count(tasks.count_N), self._spread_N(tasks)]
        pairs = deduplicate_task_rows(batch) if self.single_columns or self.multi_columns else None
        for entries in _columns(batch, pairs, self.single_columns, self.multi_columns):
            sum_N, count_N = rows.shared_label_sums(entries)
            found += [self._smooth(sum_N, count_N, mean_N) - mean_N, scale_count(count_N)]
        if self.neighbours_column is not None and lists is not None:
            rated = RatedRows(
                rows.task_N,
                find_ids_N(batch, self.neighbours_column),
                rows.is_support_N,
                rows.label_N,
                labels.label_N > 0,
                mean_N,
                tasks.count_N,
                group_N,
            )
            found += make_neighbour_features(lists, find_levels_N(lists, batch), rated)
        return np.stack(found, axis=1).astype(np.float32)

    def _expected_N(self, batch: TaskBatch) -> Floats:
        if self.expected_place is None:
            return np.zeros(batch.num_rows)
        statistic_N: Floats = batch.dense_NK[:, self.expected_place].numpy().astype(np.float64)
        if not self.log_odds:
            return statistic_N
        share_N: Floats = 1.0 / (1.0 + np.exp(-(log_odds(self.prior.mean) + statistic_N)))
        return (share_N - self.prior.mean) / self.prior.deviation

    def _log_odds_N(self, rows: _LabelRows, tasks: _Totals, expected_N: Floats) -> Floats:
        deviation, mean, a = self.prior.deviation, self.prior.mean, self.prior_strength
        share_N = expected_N * deviation + mean
        expected_log_odds_N = rows.sum_of_others(np.where(rows.is_support_N, share_N, 0.0))
        # Without rows and without shrinkage it would be 0 / 0, which is masked below.
        weight_N = np.maximum(tasks.count_N + a, 1e-12)
        clicks_N = expected_log_odds_N + tasks.sum_N * deviation
        effect_N = log_odds((clicks_N + a * mean) / weight_N)
        effect_N -= log_odds((expected_log_odds_N + a * mean) / weight_N)
        return np.where(tasks.count_N > 0, effect_N, 0.0)

    def _smooth(self, sum_N: Floats, count_N: Floats, prior_N: Floats) -> Floats:
        weight_N = count_N + self.prior_strength
        known_N = weight_N > 0
        total_N = sum_N + self.prior_strength * prior_N
        return np.divide(total_N, weight_N, out=prior_N.copy(), where=known_N)

    def _spread_N(self, tasks: _Totals) -> Floats:
        count_N = np.maximum(tasks.count_N, 1.0)
        # Rounding may make it negative.
        around_N = np.maximum(tasks.square_N - tasks.sum_N**2 / count_N, 0.0)
        variance_N = self._smooth(around_N, tasks.count_N, np.ones(len(around_N)))
        return np.sqrt(variance_N) - 1.0


class _Totals(NamedTuple):
    """Sums over the support rows of each row's task, without the row itself, or its group."""

    sum_N: Floats
    square_N: Floats
    count_N: Floats


class _Entries(NamedTuple):
    """The (task, id) pairs that each row holds in one column, each once."""

    row_V: Int64
    pair_V: Int64
    num_pairs: int


@dataclass(frozen=True)
class _LabelRows:
    task_N: Int64
    is_support_N: npt.NDArray[np.bool_]
    label_N: Floats  # 0 where it is no support row's
    num_tasks: int
    group_N: Int64 | None = None  # None: each row is one of its own

    @classmethod
    def of(cls, batch: TaskBatch, prior: LabelPrior, group_N: Int64 | None) -> _LabelRows:
        rows_T = np.diff(batch.row_offsets_T1.numpy())
        task_N = owners(rows_T)
        is_support_N = find_firsts(rows_T, batch.support_lengths_T.numpy())
        # The labels of query rows are not looked at: a caller may not know them.
        label_N = (batch.label_N.numpy().astype(np.float64) - prior.mean) / prior.deviation
        known_N = np.where(is_support_N, label_N, 0.0)
        return cls(task_N, is_support_N, known_N, len(rows_T), group_N)

    def minus_expected(self, expected_N: Floats) -> _LabelRows:
        return replace(self, label_N=self.label_N - np.where(self.is_support_N, expected_N, 0.0))

    def totals(self) -> _Totals:
        values = self.label_N, self.label_N**2, self.is_support_N.astype(np.float64)
        return _Totals(*map(self.sum_of_others, values))

    def shared_label_sums(self, entries: _Entries) -> tuple[Floats, Floats]:
        counted_N, by_group = self.is_support_N.astype(np.float64), (*entries, self.group_N)
        return sum_of_sharing(self.label_N, *by_group), sum_of_sharing(counted_N, *by_group)

    def sum_of_others(self, value_N: Floats) -> Floats:
        sum_T = np.bincount(self.task_N, value_N, self.num_tasks)
        own_N = value_N
        if self.group_N is not None:
            own_N = np.bincount(self.group_N, value_N)[self.group_N].astype(float)
        others_N: Floats = sum_T[self.task_N] - own_N
        return others_N


def _find_expected_place(
    config: SupportFeaturesConfig, features: Features, items: ItemFeaturesConfig | None
) -> int:
    name = config.residual_of
    if not config.is_used:
        raise ValueError(
            f"support_features.residual_of: {name!r} changes nothing without support_features.task "
            'or support_features.columns. Set one of them, or leave the key out: ""'
        )
    known = [column.name for column in features.sparse]
    patterns = items.columns if items is not None else ()
    chosen = choose_columns("item_features.columns", patterns, known)
    names = [one for one, is_chosen in zip(known, chosen, strict=True) if is_chosen]
    if name not in names:
        raise ValueError(
            f"support_features.residual_of: {name!r} is none of the columns that "
            f"item_features.columns chooses: {', '.join(names) or 'none'}. Name one of them, add "
            'it there, or leave the key out: ""'
        )
    # A mean and a number of each, behind the columns of the data.
    return len(features.dense) + 2 * names.index(name)


def _columns(
    batch: TaskBatch, pairs: TaskRows | None, single: tuple[int, ...], multi: tuple[int, ...]
) -> list[_Entries]:
    """Return the entries of these columns, single-id ones first."""
    if pairs is None:
        return []
    num_pairs = pairs.level1_position_P.numel()
    known_P = (batch.unique_ids_U[pairs.level1_position_P] != OOV_ROW).numpy()
    every_row_N = np.arange(batch.num_rows)
    found = [(every_row_N, pairs.positions_NF[:, column].numpy()) for column in single]
    if multi:
        lengths_NM = batch.multi_lengths_NM.numpy()
        row_V, column_V = owners(sum_rows(lengths_NM)), find_features_of_values(lengths_NM)
        pair_V = pairs.multi_positions_V.numpy()
        for column in multi:
            mine_V = column_V == column
            # Sorted and each once: a row that repeats an id holds it no more than another does.
            key_V = np.unique(row_V[mine_V] * num_pairs + pair_V[mine_V])
            found.append((key_V // max(num_pairs, 1), key_V % max(num_pairs, 1)))
    entries = []
    for row_V, pair_V in found:
        # Unknown ids are no values: no two rows share them.
        known_V = known_P[pair_V]
        entries.append(_Entries(row_V[known_V], pair_V[known_V], num_pairs))
    return entries


NO_STATISTICS = SupportStatistics(False, (), (), (), 0.0, NO_PRIOR)
