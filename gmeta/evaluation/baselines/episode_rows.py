"""Episodes as plain rows: labels, ids and tasks, without embeddings or torch.
Shape suffixes: T tasks, N rows, F single-id or pooled features, V values, K dense columns, L
labels"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gmeta.data.support_views import SupportView
from gmeta.metrics.scored_label import ScoredLabel
from metaio.format.features import Features
from metaio.hashing import splitmix64, unit_interval
from metaio.ragged import Float32, Int64, index_entries, offsets, owners, places, ragged_indices

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Streams of hashes: a task's fold, half and sample and the draw of its rows must not depend on each
# other.
FOLD_STREAM, SAMPLE_STREAM, DRAW_STREAM, MASK_STREAM, HALF_STREAM = 1, 2, 3, 4, 5
NO_ITEM = -1
# A column follows from the item if this share of the item's other rows agrees with its first one.
FOLLOWS_ITEM_SHARE = 0.99


@dataclass(frozen=True)
class IdLists:
    """The ids of one multi-id feature: row n has those from `offsets_N1[n]` on."""

    ids_V: Int64
    offsets_N1: Int64

    def select(self, rows_N: Int64) -> "IdLists":
        """Return the lists of these rows, in their order."""
        lengths_N = np.diff(self.offsets_N1)[rows_N]
        return IdLists(self.ids_V[index_entries(self.offsets_N1, rows_N)], offsets(lengths_N))

    @property
    def row_V(self) -> Int64:
        """Return the row of each id."""
        return owners(np.diff(self.offsets_N1))


@dataclass(frozen=True)
class EpisodeRows:
    """Complete episodes, the rows of each together, support rows first."""

    task_T: Int64
    row_offsets_T1: Int64
    support_lengths_T: Int64
    # [N, L] where there are several labels, NaN where one is not known.
    label_N: Floats
    ids_NF: Int64
    multi: tuple[IdLists, ...]
    dense_NK: Float32
    # The newest events that each row knows, by the events' columns, the oldest of them first.
    known_events: tuple[IdLists, ...] = ()

    @property
    def num_rows(self) -> int:
        """Return N."""
        return len(self.label_N)

    @property
    def episode_N(self) -> Int64:
        """Return the index of each row's episode."""
        return owners(np.diff(self.row_offsets_T1))

    @property
    def is_support_N(self) -> Bools:
        """Return which rows are support; the others are query rows."""
        within_N = places(np.diff(self.row_offsets_T1))
        support: Bools = within_N < self.support_lengths_T[self.episode_N]
        return support

    def ids_of(self, column: int) -> Int64:
        """Return a single-id column's id in each row; 0 for column -1, which is none."""
        return self.ids_NF[:, column] if column >= 0 else np.zeros(self.num_rows, np.int64)

    def reorder(self, order_N: Int64, support_lengths_T: Int64) -> "EpisodeRows":
        """Return the rows in an order that keeps episodes together, with new support lengths."""
        lengths_T = np.bincount(self.episode_N[order_N], minlength=len(self.task_T))
        kept = replace(self, row_offsets_T1=offsets(lengths_T))
        return kept._select_rows(order_N, support_lengths_T)

    def apply_view(self, view: SupportView) -> "EpisodeRows":
        """Return the rows that an evaluation shows in a view."""
        return self if view.is_stored else self.reorder(*view.order_rows(self))

    def select_label(self, label: ScoredLabel, is_predicted: bool = False) -> "EpisodeRows":
        """Return the rows with a known label, with it alone; `is_predicted`: and all query rows."""
        label_N = label.label_N(self.label_N)
        known_N = ~np.isnan(label_N)
        kept_N = known_N | (~self.is_support_N & is_predicted)
        support_T = np.bincount(
            self.episode_N, known_N & self.is_support_N, minlength=len(self.task_T)
        )
        rows = replace(self, label_N=label_N)
        return rows.reorder(np.flatnonzero(kept_N), support_T.astype(np.int64))

    def _select_rows(self, rows_N: Int64, support_lengths_T: Int64) -> "EpisodeRows":
        return replace(
            self,
            support_lengths_T=support_lengths_T,
            label_N=self.label_N[rows_N],
            ids_NF=self.ids_NF[rows_N],
            multi=tuple(lists.select(rows_N) for lists in self.multi),
            dense_NK=self.dense_NK[rows_N],
            known_events=tuple(lists.select(rows_N) for lists in self.known_events),
        )

    def select_episodes(self, chosen: Int64) -> "EpisodeRows":
        """Return these episodes, in this order."""
        rows_N = index_entries(self.row_offsets_T1, chosen)
        offsets_T1 = offsets(np.diff(self.row_offsets_T1)[chosen])
        kept = replace(self, task_T=self.task_T[chosen], row_offsets_T1=offsets_T1)
        return kept._select_rows(rows_N, self.support_lengths_T[chosen])

    def select_first_rows(self, lengths_T: Int64, support_lengths_T: Int64) -> "EpisodeRows":
        """Return the first `lengths_T` rows of each episode, with new support lengths."""
        rows_N = ragged_indices(self.row_offsets_T1[:-1], lengths_T)
        kept = replace(self, row_offsets_T1=offsets(lengths_T))
        return kept._select_rows(rows_N, support_lengths_T)


def concatenate_episodes(parts: Iterable[EpisodeRows]) -> EpisodeRows:
    """Return the episodes of all parts as one."""
    found = list(parts)
    return EpisodeRows(
        np.concatenate([part.task_T for part in found]),
        offsets(np.concatenate([np.diff(part.row_offsets_T1) for part in found])),
        np.concatenate([part.support_lengths_T for part in found]),
        np.concatenate([part.label_N for part in found]),
        np.concatenate([part.ids_NF for part in found]),
        tuple(map(concatenate_lists, zip(*(part.multi for part in found), strict=True))),
        np.concatenate([part.dense_NK for part in found]),
        tuple(map(concatenate_lists, zip(*(part.known_events for part in found), strict=True))),
    )


def concatenate_lists(parts: Sequence[IdLists]) -> IdLists:
    """Return the lists of one feature, of the rows of all parts one after the other."""
    return IdLists(
        np.concatenate([lists.ids_V for lists in parts]),
        offsets(np.concatenate([np.diff(lists.offsets_N1) for lists in parts])),
    )


def sample_share(rows: EpisodeRows, share: float, seed: int) -> EpisodeRows:
    """Return about this share of the tasks, with all their episodes; 1 or more: all."""
    if share >= 1.0:
        return rows
    # By a hash of the task's id: all episodes of a task are drawn together, in whatever block they
    # are.
    is_chosen_T = hash_uniform(rows.task_T, SAMPLE_STREAM, seed) < share
    return rows.select_episodes(np.flatnonzero(is_chosen_T))


def sample_about(rows: EpisodeRows, max_rows: int, seed: int) -> EpisodeRows:
    """Return a sample of tasks with about `max_rows` rows, or all if they have no more."""
    first_share = max_rows / max(rows.num_rows, 1)
    return sample_until_some(lambda share: sample_share(rows, share, seed), first_share)


def sample_until_some(sample: Callable[[float], EpisodeRows], share: float) -> EpisodeRows:
    """Return what is drawn at this share of the tasks, or else at twice the share, and so on."""
    # Of few large tasks, such as advertisers, hashes may choose none.
    rows = sample(share)
    return rows if rows.num_rows or share >= 1.0 else sample_until_some(sample, 2 * share)


def hash_uniform(names: Int64, stream: int, seed: int) -> Floats:
    """Return a number in [0, 1) for each name: its hash under stream and seed."""
    key = splitmix64(np.array([(stream << 32) ^ (seed % 2**32)], dtype=np.uint64))
    mixed = splitmix64(splitmix64(names.astype(np.uint64)) ^ key)
    return unit_interval(mixed)


def find_item_columns(rows: EpisodeRows, features: Features, item: int) -> tuple[bool, ...]:
    """Return which sparse columns follow from the item, as a film's director does; the item too."""
    if item == NO_ITEM:
        return (False,) * len(features.sparse)
    id_N = rows.ids_of(item)
    _, first, index_N = np.unique(id_N, return_index=True, return_inverse=True)
    # Row 0 stands for all values that the vocabulary lacks. A first row always agrees with itself.
    is_informative_N = id_N != 0
    is_informative_N[first] = False
    found = []
    for column in range(len(features.sparse)):
        lists = make_lists(rows, column)
        # Random weights: lists that are equal have equal sums, others hardly ever.
        weight_V = np.random.default_rng(0).random(4099)[lists.ids_V % 4099]
        mark_N = np.bincount(lists.row_V, weight_V, minlength=rows.num_rows)
        # A share, not all: a log may correct a film's genre once.
        agrees_N = np.isclose(mark_N, mark_N[first][index_N])[is_informative_N]
        share = float(agrees_N.mean()) if agrees_N.size else 0.0
        found.append(column == item or share >= FOLLOWS_ITEM_SHARE)
    return tuple(found)


def make_lists(rows: EpisodeRows, column: int) -> IdLists:
    """Return a sparse column's ids as lists; those of a single-id column have one id each."""
    num_single = rows.ids_NF.shape[1]
    if column >= num_single:
        lists: IdLists = rows.multi[column - num_single]
        return lists
    return IdLists(rows.ids_NF[:, column], offsets(np.ones(rows.num_rows, np.int64)))
