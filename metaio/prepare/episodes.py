"""Cuts the sorted rows of whole tasks into episodes of support and query rows.

Shape suffixes: N rows, T tasks or episodes, V ids of all multi-id features; T1 = T + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from metaio.counted import counted
from metaio.errors import DataError
from metaio.format.block import Rows
from metaio.prepare.encode import EncodedRows
from metaio.prepare.schema import EpisodeRule, Schema
from metaio.ragged import Int64, offsets, ragged_indices, row_sums


@dataclass(frozen=True)
class Dropped:
    """What a bucket lost: tasks and rows below min_rows, tasks with one side only, rows cut off by
    truncate.
    """

    short_tasks: int = 0
    short_rows: int = 0
    one_sided_episodes: int = 0
    one_sided_rows: int = 0
    truncated_rows: int = 0

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(
            *(own + its for own, its in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def check_some(num_episodes: int, dropped: Dropped) -> None:
    """Refuse a dataset of nothing: whoever trains on it would find out much later.

    Raises:
        DataError: every task was left out.
    """
    if not num_episodes:
        raise DataError(
            f"the inputs make 0 episodes: {counted(dropped.short_tasks, 'task')} with fewer rows "
            f"than min_rows, {dropped.one_sided_episodes:,} without support or query. Lower "
            "min_rows or query_rows under [episodes], or look into the task column"
        )


class Episodes:
    """Episodes of a bucket's rows: which rows, in which order. `part` gathers some of them."""

    def __init__(
        self,
        rows: EncodedRows,
        order_N: Int64,
        row_lengths_T: Int64,
        support_lengths_T: Int64,
    ) -> None:
        self.row_lengths_T = row_lengths_T
        self._rows = rows
        self._order_N = order_N
        self._row_offsets_T1 = offsets(row_lengths_T)
        self._support_lengths_T = support_lengths_T
        self._value_lengths_N = row_sums(rows.lengths_NM)
        self._value_starts_N = np.cumsum(self._value_lengths_N) - self._value_lengths_N

    def part(self, first: int, stop: int) -> Rows:
        """Return episodes [first, stop), each array gathered once from its place in the bucket.

        A part at a time, because a bucket in order would be a second copy of it in memory.
        """
        begin, end = self._row_offsets_T1[[first, stop]].tolist()
        chosen_N = self._order_N[begin:end]
        values = ragged_indices(self._value_starts_N[chosen_N], self._value_lengths_N[chosen_N])
        rows = self._rows
        return Rows(
            task_T=rows.task_N[self._order_N[self._row_offsets_T1[first:stop]]],
            row_lengths_T=self.row_lengths_T[first:stop],
            support_lengths_T=self._support_lengths_T[first:stop],
            label_N=rows.label_N[chosen_N],
            dense_NK=np.take(rows.dense_NK, chosen_N, axis=0),
            ids_NF=np.take(rows.ids_NF, chosen_N, axis=0),
            multi_ids_V=rows.values_V[values],
            multi_lengths_NM=np.take(rows.lengths_NM, chosen_N, axis=0),
            row_id_N=np.take(rows.row_id_NR, chosen_N, axis=0).ravel(),
        )


def make_episodes(
    schema: Schema, rows: EncodedRows, cut_time: int | None
) -> tuple[Episodes, Dropped]:
    """Return the episodes of all rows, which hold whole tasks in any order, and what was dropped.

    Tasks stand in the order of their hash; rows of a task by (time, row hash), or by row hash alone
    where the rule is random. `cut_time` is `episodes.at` on the scale of the time column.

    Raises:
        DataError: a task is longer than max_rows and the rule refuses that.
    """
    rule = schema.episodes
    # One sort brings tasks together and their rows into order; the rest is offsets into it.
    order_N = _total_order(rows, rule)
    task_N = rows.task_N[order_N]
    changes = task_N[1:] != task_N[:-1]
    starts_T = np.flatnonzero(np.concatenate([np.ones(min(rows.num_rows, 1), np.bool_), changes]))
    lengths_T = np.diff(starts_T, append=rows.num_rows)
    first_T, length_T, dropped = _cut(rule, starts_T, lengths_T, task_N)
    # By the rule, which may leave a side empty: `by = time` knows nothing of lengths.
    support_T = _support_rows(rule, first_T, length_T, rows.time_N[order_N], cut_time)
    # An episode without support cannot adapt, one without query cannot be scored.
    both = (support_T > 0) & (support_T < length_T)
    dropped += Dropped(
        one_sided_episodes=int((~both).sum()),
        one_sided_rows=int(length_T[~both].sum(dtype=np.int64)),
    )
    first_T, length_T, support_T = first_T[both], length_T[both], support_T[both]
    # Dropped rows fall out here, and are never copied.
    chosen_N = order_N[ragged_indices(first_T, length_T)]
    return Episodes(rows, chosen_N, length_T, support_T), dropped


def _total_order(rows: EncodedRows, rule: EpisodeRule) -> Int64:
    """Return the order by task, then time, then row hash: it is total, for rows equal in all three
    are equal rows.
    """
    if rule.by == "random":
        return _order_of_ranks(_ranks(rows.task_hash_N), _ranks(rows.row_hash_N))
    task_N, time_N = _ranks(rows.task_hash_N), _ranks(rows.time_N)
    order_N = _order_of_ranks(task_N, time_N)
    # Few rows share task and time, so only they are sorted by their hash.
    same = np.diff(task_N[order_N]) == 0
    same &= np.diff(time_N[order_N]) == 0
    in_run = np.zeros(len(order_N), dtype=np.bool_)
    in_run[1:] = same
    in_run[:-1] |= same
    places = np.flatnonzero(in_run)
    run = np.concatenate([[0], np.cumsum(~same)])[places]
    tied = order_N[places]
    order_N[places] = tied[np.lexsort((rows.row_hash_N[tied], run))]
    return order_N


def _ranks(values_N: npt.NDArray[Any]) -> Int64:
    """Return ranks: 0 for the least value, 1 for the next one, and so on; equal values share a
    rank.
    """
    order_N = np.argsort(values_N)
    ordered = values_N[order_N]
    ranks_N = np.empty(len(values_N), dtype=np.int64)
    ranks_N[order_N] = np.concatenate(
        [np.zeros(min(len(ordered), 1), np.int64), np.cumsum(ordered[1:] != ordered[:-1])]
    )
    return ranks_N


def _order_of_ranks(first_N: Int64, then_N: Int64) -> Int64:
    # One key of 64 bits: sorting it (AVX2, AVX-512) is four times as fast as a sort by two keys.
    order: Int64 = np.argsort((first_N << 32) | then_N)
    return order


def _cut(
    rule: EpisodeRule, starts_T: Int64, lengths_T: Int64, task_N: Int64
) -> tuple[Int64, Int64, Dropped]:
    """Return first row and length of each episode: short tasks are left out, long ones cut."""
    short = lengths_T < rule.min_rows
    dropped = Dropped(short_tasks=int(short.sum()), short_rows=int(lengths_T[short].sum()))
    starts_T, lengths_T = starts_T[~short], lengths_T[~short]
    too_long = lengths_T > rule.max_rows
    if rule.longer == "refuse" and too_long.any():
        worst = int(np.argmax(lengths_T))
        raise DataError(
            f"task {task_N[starts_T[worst]]} has {lengths_T[worst]:,} rows, episodes.max_rows is "
            f"{rule.max_rows:,}. Raise it, or set episodes.longer to 'episodes' or 'truncate'"
        )
    # Rows stand from old to new: what is kept is the end.
    if rule.longer == "truncate":
        kept_T = np.minimum(lengths_T, rule.max_rows)
        dropped += Dropped(truncated_rows=int((lengths_T - kept_T).sum()))
        return starts_T + lengths_T - kept_T, kept_T, dropped
    # As few parts as max_rows allows, of equal size but for one row, none shorter than min_rows.
    # Where both limits cannot hold (14 rows, 13 to 13), the oldest rows go: they say least.
    parts_T = np.minimum(-(-lengths_T // rule.max_rows), lengths_T // rule.min_rows)
    kept_T = np.minimum(lengths_T, parts_T * rule.max_rows)
    dropped += Dropped(truncated_rows=int((lengths_T - kept_T).sum()))
    starts_T, lengths_T = starts_T + lengths_T - kept_T, kept_T
    task_E = np.repeat(np.arange(len(parts_T)), parts_T)
    part_E = np.arange(len(task_E)) - np.repeat(offsets(parts_T)[:-1], parts_T)
    first_E = part_E * lengths_T[task_E] // parts_T[task_E]
    stop_E = (part_E + 1) * lengths_T[task_E] // parts_T[task_E]
    return starts_T[task_E] + first_E, stop_E - first_E, dropped


def _support_rows(
    rule: EpisodeRule, first_T: Int64, length_T: Int64, time_N: Int64, cut_time: int | None
) -> Int64:
    if rule.by == "time":
        rows = ragged_indices(first_T, length_T)
        before = offsets(time_N[rows] < np.int64(cut_time or 0))
        ends = offsets(length_T)
        support_T: Int64 = before[ends[1:]] - before[ends[:-1]]
        return support_T
    if rule.query_rows is not None:
        return np.maximum(length_T - rule.query_rows, 0)
    # Rounded up, but each side keeps a row: a share of 0.1 of 4 rows is 1 query row.
    query_T: Int64 = np.ceil(length_T * (rule.query_share or 0.0)).astype(np.int64)
    return length_T - np.clip(query_T, 1, length_T - 1)


def bucket_of(task_hash: npt.NDArray[np.uint64], num_buckets: npt.NDArray[np.uint64]) -> Int64:
    """Return which of `num_buckets` a task falls into: ranges of its hash, to keep the order of
    tasks.
    """
    # The top 32 bits are enough to spread tasks evenly, and leave room for the product in 64 bits.
    return ((task_hash >> np.uint64(32)) * num_buckets >> np.uint64(32)).astype(np.int64)
