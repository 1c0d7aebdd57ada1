"""Samples items beside each positive query row, to measure rank metrics on.

A sampled row is its positive row with the columns of another item, drawn evenly from all items that
the task has no row of.
Shape suffixes: T tasks, N rows, F single-id or pooled features, V values, K dense columns"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gmeta.data.support_views import SupportView
from gmeta.errors import UserError
from gmeta.evaluation.baselines.block_rows import read_rows, sample_rows
from gmeta.evaluation.baselines.episode_rows import (
    Bools,
    EpisodeRows,
    concatenate_episodes,
    concatenate_lists,
    find_item_columns,
)
from gmeta.metrics.scored_label import ONE_LABEL, ScoredLabel
from metaio.format.dataset import Dataset
from metaio.format.features import find_vector_column
from metaio.prepare.schema.schema_file import read_item_rule
from metaio.ragged import Int64, offsets

# Rows that are predicted at once, with the sampled ones; a longer task is not split.
MOST_ROWS = 100_000
# Rows that show which columns follow from the item.
SAMPLE_ROWS = 200_000


@dataclass(frozen=True)
class RowsWithCandidates:
    """Episodes with sampled rows after each positive query row."""

    rows: EpisodeRows
    is_sampled_N: Bools
    # The row that each row was made from.
    source_N: Int64


@dataclass(frozen=True)
class Candidates:
    """The items to sample: `items` has a row for each."""

    per_positive: int
    label: ScoredLabel
    # The least label of a positive row.
    threshold: float
    item: int
    # Which sparse and which dense columns change with the item.
    sparse: tuple[bool, ...]
    dense: tuple[int, ...]
    items: EpisodeRows
    # The places in `items` of each task's items.
    of_task: dict[int, Int64]

    def add_candidates(self, rows: EpisodeRows, view: SupportView) -> Iterator[RowsWithCandidates]:
        """Yield the episodes with sampled rows, as many at a time as MOST_ROWS allows."""
        is_positive_N = self._find_positives_N(rows)
        size_N = 1 + self.per_positive * is_positive_N.astype(np.int64)
        size_T = np.bincount(rows.episode_N, size_N, len(rows.task_T))
        # Episodes are not split: a task adapts once, for all of its rows.
        chunk_T = (np.cumsum(size_T) - 1) // MOST_ROWS
        for chunk in np.unique(chunk_T).tolist():
            chosen = np.flatnonzero(chunk_T == chunk)
            listed = self._add_to_rows(rows.select_episodes(chosen), view.draw)
            yield replace(listed, source_N=listed.source_N + rows.row_offsets_T1[chosen[0]])

    def _find_positives_N(self, rows: EpisodeRows) -> Bools:
        # An unknown label is NaN, and NaN >= x is false: its row is not positive.
        return (self.label.label_N(rows.label_N) >= self.threshold) & ~rows.is_support_N

    def _add_to_rows(self, rows: EpisodeRows, draw: int) -> RowsWithCandidates:
        is_positive_N = self._find_positives_N(rows)
        repeats_N = 1 + self.per_positive * is_positive_N.astype(np.int64)
        source_N = np.repeat(np.arange(rows.num_rows), repeats_N)
        is_sampled_N = np.ones(len(source_N), np.bool_)
        is_sampled_N[offsets(repeats_N)[:-1]] = False
        listed = rows.reorder(source_N, rows.support_lengths_T)
        places = self._draw_items(rows, is_positive_N, draw)
        # The items stand after the rows: a sampled row takes its lists from its item's place there.
        source_place_N = np.arange(len(source_N))
        source_place_N[is_sampled_N] = len(source_N) + places
        num_single = rows.ids_NF.shape[1]
        for column in np.flatnonzero(self.sparse[:num_single]).tolist():
            listed.ids_NF[is_sampled_N, column] = self.items.ids_NF[places, column]
        for column in self.dense:
            listed.dense_NK[is_sampled_N, column] = self.items.dense_NK[places, column]
        pairs = zip(listed.multi, self.items.multi, self.sparse[num_single:], strict=True)
        multi = tuple(
            concatenate_lists((own, items)).select(source_place_N) if changes else own
            for own, items, changes in pairs
        )
        return RowsWithCandidates(replace(listed, multi=multi), is_sampled_N, source_N)

    def _draw_items(self, rows: EpisodeRows, is_positive_N: Bools, draw: int) -> Int64:
        found = [np.zeros(0, np.int64)]
        count_T = np.bincount(rows.episode_N[is_positive_N], minlength=len(rows.task_T))
        num_items = self.items.num_rows
        for task, positives in zip(rows.task_T.tolist(), count_T.tolist(), strict=True):
            if not positives:
                continue
            others = np.delete(np.arange(num_items), self.of_task[task])
            # Seeded by draw and task alone: every model and baseline meets the same candidates, in
            # whatever order the tasks come.
            random = np.random.default_rng([draw, task % 2**64])
            item_draws = (
                random.choice(others, self.per_positive, replace=False) for _ in range(positives)
            )
            found.extend(item_draws)
        return np.concatenate(found)


def make_candidates(
    dataset: Dataset,
    splits: Sequence[str],
    per_positive: int,
    threshold: float,
    item_column: str = "",
    label: ScoredLabel = ONE_LABEL,
) -> Candidates:
    """Return what to sample for the tasks of `splits`, from one pass over the dataset."""
    rule, features = read_item_rule(dataset.manifest), dataset.features
    names = [feature.name for feature in features.single]
    name = item_column or (rule.column if rule is not None else "")
    if name not in names:
        raise UserError(
            f"evaluation.candidates = {per_positive}, but nothing says which column of "
            f"{dataset.url} is the item. Name it under [item] in its schema and prepare it again, "
            "or with --item-column"
        )
    item = names.index(name)
    # The item's attributes: those of [item] or [negatives] in the schema, else the columns that
    # follow from the item.
    listed = rule.features if rule is not None and rule.column == name else (name,)
    sparse = tuple(feature.name in listed for feature in features.sparse)
    if len(listed) == 1:
        sample = sample_rows(dataset, next(iter(dataset.splits)), SAMPLE_ROWS, 0)
        sparse = find_item_columns(sample, features, item)
    dense = tuple(
        at for at, name in enumerate(features.dense) if find_vector_column(name) in listed
    )
    # Scored splits first: when the others are read, all tasks whose items are needed are known.
    order = [*splits, *(split for split in dataset.splits if split not in splits)]
    scored: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    parts: list[EpisodeRows] = []
    known: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    pairs: list[npt.NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
    for split in order:
        for rows in read_rows(dataset, split):
            if split in splits:
                scored = np.union1d(scored, rows.task_T)
            id_N, task_N = rows.ids_of(item).astype(np.int64), rows.task_T[rows.episode_N]
            ids, first = np.unique(id_N, return_index=True)
            # Row 0 stands for all values that the vocabulary lacks, so it is no item.
            is_new = ~np.isin(ids, known) & (ids != 0)
            parts.append(_select_rows(rows, first[is_new]))
            known = np.union1d(known, ids[is_new])
            kept_N = np.isin(task_N, scored) & (id_N != 0)
            pairs.append(np.unique(np.stack([task_N[kept_N], id_N[kept_N]], axis=1), axis=0))
    items = concatenate_episodes(parts)
    # By id, as searchsorted below needs it, and whichever splits are scored.
    by_id = np.argsort(items.ids_of(item), kind="stable")
    items = items.select_episodes(by_id)
    pair = np.unique(np.concatenate(pairs), axis=0)
    place = np.searchsorted(items.ids_of(item), pair[:, 1])
    tasks, begins = np.unique(pair[:, 0], return_index=True)
    of_task = dict.fromkeys(scored.tolist(), np.zeros(0, np.int64))
    of_task |= dict(zip(tasks.tolist(), np.split(place, begins)[1:], strict=True))
    for task, own in of_task.items():
        if items.num_rows - len(own) < per_positive:
            raise UserError(
                f"evaluation.candidates = {per_positive}, but task {task} has no row of "
                f"{items.num_rows - len(own):,} of the {items.num_rows:,} items alone. Lower it"
            )
    return Candidates(per_positive, label, threshold, item, sparse, dense, items, of_task)


def rank_among_candidates_N2(
    score_N: npt.NDArray[np.floating], is_sampled_N: Bools
) -> npt.NDArray[np.int32]:
    """Return how many sampled rows score above each other row, and how many the same; or -1."""
    first_N = np.flatnonzero(~is_sampled_N)
    owner_N = np.cumsum(~is_sampled_N) - 1
    owner_score = score_N[first_N][owner_N[is_sampled_N]]
    sampled_score, sampled_owner = score_N[is_sampled_N], owner_N[is_sampled_N]
    tied_N = np.bincount(sampled_owner, sampled_score == owner_score, len(first_N))
    # Rows below are counted, and those above follow: NaN, which is neither, counts as above.
    below_N = np.bincount(sampled_owner, sampled_score < owner_score, len(first_N))
    count_N = np.bincount(sampled_owner, minlength=len(first_N))
    found = np.stack([count_N - tied_N - below_N, tied_N], axis=1)
    # Rows beside which no row was sampled.
    found[count_N == 0] = -1
    return found.astype(np.int32)


def _select_rows(rows: EpisodeRows, chosen: Int64) -> EpisodeRows:
    single = replace(
        rows,
        task_T=rows.task_T[rows.episode_N],
        row_offsets_T1=np.arange(rows.num_rows + 1),
        support_lengths_T=np.zeros(rows.num_rows, np.int64),
    )
    return single.select_episodes(chosen)
