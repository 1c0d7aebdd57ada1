"""Cuts the sorted rows of complete tasks into episodes of support and query rows.

Shape suffixes: T tasks, N rows, M multi-id features, V values, E chosen episodes"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from metaio.errors import DataError, TooFewRowsError
from metaio.prepare.episodes.encoded_rows import EncodedRows, select_rows
from metaio.prepare.episodes.events import TaskEvents
from metaio.prepare.episodes.gather import BucketEpisodes
from metaio.prepare.episodes.negatives import Catalogue, NegativeSampler
from metaio.prepare.episodes.row_order import hash_row_identity, sort_rows
from metaio.prepare.episodes.splits import Cutting
from metaio.prepare.schema.event_columns import EventClock
from metaio.prepare.schema.rules import EpisodeRule
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.side_columns import EVENT_ONLY, QUERY, SUPPORT
from metaio.quantities import format_count
from metaio.ragged import Int64, find_run_starts, offsets, owners, places, ragged_indices


@dataclass(frozen=True)
class DroppedRows:
    """What a bucket lost, by reason."""

    # Below min_rows.
    short_tasks: int = 0
    short_rows: int = 0
    # With support rows or query rows alone.
    one_sided_episodes: int = 0
    one_sided_rows: int = 0
    truncated_rows: int = 0
    # Above max_rows.
    long_tasks: int = 0
    long_rows: int = 0
    # Without a row before a window of time.
    new_tasks: int = 0
    new_rows: int = 0

    def __add__(self, other: DroppedRows) -> DroppedRows:
        return DroppedRows(
            *(own + its for own, its in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def report(self) -> dict[str, int]:
        """Return the counts by name; of rules that few schemas have, only those above 0."""
        rare = ("long_tasks", "long_rows", "new_tasks", "new_rows")
        return {name: count for name, count in vars(self).items() if count or name not in rare}


def check_not_empty(num_episodes: int, dropped: DroppedRows) -> None:
    """Raise TooFewRowsError for a dataset without episodes."""
    # Training on an empty dataset would fail much later, and with a worse message.
    if not num_episodes:
        long = f", {dropped.long_tasks:,} with more than max_rows" if dropped.long_tasks else ""
        raise TooFewRowsError(
            f"the inputs make 0 episodes: {format_count(dropped.short_tasks, 'task')} with fewer "
            f"rows than min_rows, {dropped.one_sided_episodes:,} without support or query{long}. "
            "Lower min_rows or query_rows under [episodes], or look into the task column"
        )


@dataclass(frozen=True)
class _EpisodeRanges:
    """Episodes as two ranges each of the sorted rows: support, then query."""

    support_start_T: Int64
    support_T: Int64
    query_start_T: Int64
    query_T: Int64

    def select(self, keep_T: npt.NDArray[np.bool_] | Int64) -> _EpisodeRanges:
        """Return some of the episodes, or all in another order."""
        return _EpisodeRanges(*(array[keep_T] for array in vars(self).values()))

    def merge(self, other: _EpisodeRanges) -> _EpisodeRanges:
        """Return the episodes of both, in the order of their query rows."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        both = _EpisodeRanges(*(np.concatenate(pair) for pair in pairs))
        return both.select(np.argsort(both.query_start_T, kind="stable"))


def make_episodes(
    schema: Schema,
    rows: EncodedRows,
    cut_time: int | None,
    cutting: Cutting = "rule",
    catalogue: Catalogue | None = None,
    is_train: bool = True,
    clock: EventClock | None = None,
) -> tuple[BucketEpisodes, DroppedRows]:
    """Return the episodes of all rows, which hold complete tasks, and what was dropped."""
    rule, every = schema.episodes, rows
    if (rows.side_NS == EVENT_ONLY).any():
        every, rows = _set_events_apart(rows)
    by_windows = cutting in ("window or rule", "window", "new")
    # One sort brings tasks together, by their hash, and their rows into order: the rest is offsets.
    identity_N = hash_row_identity(schema, rows)
    order_N = sort_rows(schema, rows, identity_N, by_windows)
    task_N = rows.task_N[order_N]
    starts_T = np.flatnonzero(find_run_starts(task_N))
    lengths_T = np.diff(starts_T, append=rows.num_rows)
    if cutting == "rule":
        ranges, dropped = _cut_by_rule(
            rule, starts_T, lengths_T, task_N, rows.time_N[order_N], cut_time
        )
    else:
        side_N = rows.side_NS[order_N, 0]
        bounds_T1 = np.append(starts_T, rows.num_rows)
        support_T, query_T = (
            np.diff(offsets(side_N == side)[bounds_T1]) for side in (SUPPORT, QUERY)
        )
        tasks = _SidedTasks(starts_T, lengths_T, support_T, query_T)
        ranges, dropped = _cut_by_sides(schema, cutting, tasks, task_N)
    # Dropped rows are left out here, so they are never copied.
    parts = np.stack([ranges.support_start_T, ranges.query_start_T], axis=1).ravel()
    lengths = np.stack([ranges.support_T, ranges.query_T], axis=1).ravel()
    chosen_N = order_N[ragged_indices(parts, lengths)]
    sampler = NegativeSampler(schema, catalogue, is_train, rows, identity_N) if catalogue else None
    length_T = ranges.support_T + ranges.query_T
    events = None if clock is None else TaskEvents.of(schema, every, clock)
    return BucketEpisodes(rows, chosen_N, length_T, ranges.support_T, sampler, events), dropped


def _set_events_apart(rows: EncodedRows) -> tuple[EncodedRows, EncodedRows]:
    """Return the rows, those that are events alone last, and as views those that are not."""
    is_apart_N = rows.side_NS[:, 0] == EVENT_ONLY
    every = select_rows(rows, np.argsort(is_apart_N, kind="stable"))
    stop = len(is_apart_N) - int(is_apart_N.sum())
    arrays = {name: array[:stop] for name, array in vars(every).items()}
    arrays["values_V"] = every.values_V[: int(every.lengths_NM[:stop].sum())]
    return every, EncodedRows(**arrays)


def _cut_by_rule(
    rule: EpisodeRule,
    starts_T: Int64,
    lengths_T: Int64,
    task_N: npt.NDArray[np.int64],
    time_N: Int64,
    cut_time: int | None,
) -> tuple[_EpisodeRanges, DroppedRows]:
    """Return the episodes of complete tasks as [episodes] cuts them."""
    first_T, length_T, dropped = _cut_tasks(rule, starts_T, lengths_T, task_N)
    # May leave a side empty: `by = time` does not look at lengths.
    support_T = _count_support_rows(rule, first_T, length_T, time_N, cut_time)
    # An episode without support cannot adapt, one without query cannot be scored.
    both = (support_T > 0) & (support_T < length_T)
    dropped += DroppedRows(
        one_sided_episodes=int((~both).sum()),
        one_sided_rows=int(length_T[~both].sum(dtype=np.int64)),
    )
    ranges = _EpisodeRanges(first_T, support_T, first_T + support_T, length_T - support_T)
    return ranges.select(both), dropped


@dataclass(frozen=True)
class _SidedTasks:
    """Complete tasks of the sorted rows, and their numbers of rows by side."""

    start_T: Int64
    length_T: Int64
    support_T: Int64
    query_T: Int64

    def select(self, keep_T: npt.NDArray[np.bool_]) -> _SidedTasks:
        """Return some of the tasks."""
        return _SidedTasks(*(array[keep_T] for array in vars(self).values()))


def _cut_by_sides(
    schema: Schema, cutting: Cutting, tasks: _SidedTasks, task_N: npt.NDArray[np.int64]
) -> tuple[_EpisodeRanges, DroppedRows]:
    """Return the episodes of tasks with given sides; undecided tasks are cut by [episodes]."""
    rule = schema.episodes
    with_query, with_support = tasks.query_T > 0, tasks.support_T > 0
    none = np.zeros(len(tasks.start_T), dtype=np.bool_)
    if cutting == "given":
        ruled_tasks = ~with_query & ~with_support
        partly = ~ruled_tasks & (tasks.support_T + tasks.query_T < tasks.length_T)
        if partly.any():
            raise DataError(
                f"task {task_N[tasks.start_T[partly][0]]} has rows whose membership is null beside "
                "others. Fill in all rows of a task in a split, or none"
            )
        keeps = schema.membership is not None and schema.membership.without_support == "keep"
        sided_tasks = with_query & (with_support | keeps)
        lost = ~ruled_tasks & ~sided_tasks
        dropped = DroppedRows(
            one_sided_episodes=int(lost.sum()), one_sided_rows=int(tasks.length_T[lost].sum())
        )
    else:
        # A task without rows in the window does not belong to this split: nothing is lost.
        new = with_query & ~with_support
        sided_tasks = none if cutting == "new" else with_query & with_support
        ruled_tasks = none if cutting == "window" else new
        dropped = DroppedRows()
        if cutting == "window" and schema.splits.new_tasks == "drop":
            dropped = DroppedRows(
                new_tasks=int(new.sum()), new_rows=int(tasks.query_T[new].sum(dtype=np.int64))
            )
        short = sided_tasks & (tasks.length_T < rule.min_rows)
        dropped += DroppedRows(
            short_tasks=int(short.sum()), short_rows=int(tasks.length_T[short].sum())
        )
        sided_tasks = sided_tasks & ~short
    most = schema.membership.max_rows if schema.membership else None
    sides_rule = replace(rule, max_rows=most or rule.max_rows)
    given, lost_of_sides = _cut_sided_tasks(sides_rule, tasks.select(sided_tasks), task_N)
    ruled = tasks.select(ruled_tasks)
    by_rule, lost_of_rule = _cut_by_rule(
        rule, ruled.start_T, ruled.length_T, task_N, np.zeros(0, np.int64), None
    )
    return given.merge(by_rule), dropped + lost_of_sides + lost_of_rule


def _cut_sided_tasks(
    rule: EpisodeRule, tasks: _SidedTasks, task_N: npt.NDArray[np.int64]
) -> tuple[_EpisodeRanges, DroppedRows]:
    """Return the episodes of tasks with given sides, none longer than max_rows."""
    most = rule.max_rows
    too_long = tasks.length_T > most
    if rule.longer == "refuse":
        _check_length(rule, tasks.start_T, tasks.length_T, task_N)
    dropped = DroppedRows()
    if rule.longer == "drop":
        dropped = _count_long(tasks.length_T, too_long)
        tasks, too_long = tasks.select(~too_long), too_long[~too_long]
    # A longer task keeps its newest support rows; its query rows are dealt to several episodes with
    # that support ("episodes"), or the last of them are kept ("truncate").
    support_T, query_T = tasks.support_T, tasks.query_T
    parts_T, skipped_T = np.ones_like(query_T), np.zeros_like(query_T)
    if rule.longer == "truncate":
        support_T = np.clip(most - query_T, np.minimum(support_T, 1), support_T)
        skipped_T = np.maximum(query_T - (most - support_T), 0)
        query_T = query_T - skipped_T
    elif rule.longer == "episodes":
        # Each episode repeats the support: half of the room for query rows bounds the copies.
        room_T = np.minimum(support_T, np.maximum(most - query_T, most // 2))
        support_T = np.where(too_long, room_T, support_T)
        parts_T = -(-query_T // (most - support_T))
    dropped += DroppedRows(
        truncated_rows=int((tasks.length_T - support_T - query_T).sum(dtype=np.int64))
    )
    # Rows are sorted: support before query, and on each side old before new.
    query_start_T = tasks.start_T + tasks.support_T
    task_E, first_E, query_E = _split_equally(query_T, parts_T)
    ranges = _EpisodeRanges(
        (query_start_T - support_T)[task_E],
        support_T[task_E],
        (query_start_T + skipped_T)[task_E] + first_E,
        query_E,
    )
    return ranges, dropped


def _cut_tasks(
    rule: EpisodeRule, starts_T: Int64, lengths_T: Int64, task_N: Int64
) -> tuple[Int64, Int64, DroppedRows]:
    """Return first row and length of each episode: short tasks are left out, long ones cut."""
    short = lengths_T < rule.min_rows
    dropped = DroppedRows(short_tasks=int(short.sum()), short_rows=int(lengths_T[short].sum()))
    starts_T, lengths_T = starts_T[~short], lengths_T[~short]
    if rule.longer == "refuse":
        _check_length(rule, starts_T, lengths_T, task_N)
    if rule.longer == "drop":
        too_long = lengths_T > rule.max_rows
        dropped += _count_long(lengths_T, too_long)
        return starts_T[~too_long], lengths_T[~too_long], dropped
    # Rows are sorted from old to new, so the kept ones are the last.
    if rule.longer == "truncate":
        kept_T = np.minimum(lengths_T, rule.max_rows)
        dropped += DroppedRows(truncated_rows=int((lengths_T - kept_T).sum()))
        return starts_T + lengths_T - kept_T, kept_T, dropped
    # As few parts as max_rows allows, of equal size but for one row, none below min_rows. Where
    # both cannot hold (14 rows, 13 to 13), the oldest rows go: they say least.
    parts_T = np.minimum(-(-lengths_T // rule.max_rows), lengths_T // rule.min_rows)
    kept_T = np.minimum(lengths_T, parts_T * rule.max_rows)
    dropped += DroppedRows(truncated_rows=int((lengths_T - kept_T).sum()))
    starts_T, lengths_T = starts_T + lengths_T - kept_T, kept_T
    task_E, first_E, length_E = _split_equally(lengths_T, parts_T)
    return starts_T[task_E] + first_E, length_E, dropped


def _split_equally(lengths_T: Int64, parts_T: Int64) -> tuple[Int64, Int64, Int64]:
    """Return the task, first row and length of each of `parts_T` parts [E] of a task's rows."""
    task_E, part_E = owners(parts_T), places(parts_T)
    first_E = part_E * lengths_T[task_E] // parts_T[task_E]
    stop_E = (part_E + 1) * lengths_T[task_E] // parts_T[task_E]
    return task_E, first_E, stop_E - first_E


def _check_length(
    rule: EpisodeRule, starts_T: Int64, lengths_T: Int64, task_N: npt.NDArray[np.int64]
) -> None:
    """Raise DataError for the longest task, if it is longer than max_rows."""
    if lengths_T.max(initial=0) > rule.max_rows:
        worst = int(np.argmax(lengths_T))
        raise DataError(
            f"task {task_N[starts_T[worst]]} has {lengths_T[worst]:,} rows, episodes.max_rows is "
            f"{rule.max_rows:,}. Raise it, or set episodes.longer to 'episodes', 'truncate' or "
            "'drop'"
        )


def _count_long(lengths_T: Int64, too_long_T: npt.NDArray[np.bool_]) -> DroppedRows:
    return DroppedRows(
        long_tasks=int(too_long_T.sum()), long_rows=int(lengths_T[too_long_T].sum(dtype=np.int64))
    )


def _count_support_rows(
    rule: EpisodeRule, first_T: Int64, length_T: Int64, time_N: Int64, cut_time: int | None
) -> Int64:
    if rule.by == "time":
        rows = ragged_indices(first_T, length_T)
        # Rows are sorted by time, so the number of those before `cut_time` is the border.
        before = offsets(time_N[rows] < np.int64(cut_time or 0))
        ends = offsets(length_T)
        support_T: Int64 = before[ends[1:]] - before[ends[:-1]]
        return support_T
    if rule.query_rows is not None:
        return np.maximum(length_T - rule.query_rows, 0)
    # Rounded up, but each side keeps a row: a share of 0.1 of 4 rows is 1 query row.
    query_T: Int64 = np.ceil(length_T * (rule.query_share or 0.0)).astype(np.int64)
    return length_T - np.clip(query_T, 1, length_T - 1)
