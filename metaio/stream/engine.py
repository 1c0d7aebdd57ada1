"""Who makes shards of an increment's rows: one machine here, Spark in spark_engine.py.

Both deal the rows to buckets, join each bucket with the earlier rows of its tasks, and adopt its
shard."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from metaio.format.dataset_writer import DatasetWriter
from metaio.prepare.episodes.cut_episodes import DroppedRows, check_not_empty
from metaio.prepare.episodes.encode import Encoder
from metaio.prepare.episodes.encoded_rows import EncodedRows, concatenate_rows, select_rows
from metaio.prepare.episodes.event_rows import EventRowEncoder
from metaio.prepare.episodes.ordered_map import Progress, count_parallel_buckets, map_in_order
from metaio.prepare.episodes.spool import Spool
from metaio.prepare.job import HashedTableUse, Job, PrepareOptions, Use, WrittenShard
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.side_columns import EVENT_ONLY, QUERY, SUPPORT
from metaio.prepare.source.source import DuckSource
from metaio.ragged import Int64
from metaio.stream.label_windows import LabelCounts, LabelWindow, LabelWindows, merge_rows
from metaio.stream.newest_rows import (
    KeptRows,
    NewestRows,
    NewestRowsWriter,
    add_events,
    clear_freed_ids,
    drop_old_rows,
    merge_in_task_order,
    split_by_tasks,
)
from metaio.stream.numbering import Numbering
from metaio.stream.row_growth import RowGrowth
from metaio.stream.stream_state import name_rows_file, open_newest_rows
from metaio.stream.taken_files import InputFile, hash_file
from metaio.stream.window import (
    RowScreen,
    SummaryContext,
    WindowSummary,
    encode_window_rows,
    find_stream_rule,
    summarise_batch,
)

if TYPE_CHECKING:
    from metaio.stream.window_events import WindowEvents


@dataclass(frozen=True)
class WindowJob:
    """What all buckets of a window have in common; it is sent to every worker of a cluster."""

    job: Job
    screen: RowScreen
    # By table, the rows that lost their value.
    freed: dict[str, Int64]
    state: Path | None  # of the increment before, where there is one
    num_rows: int
    labels: dict[str, LabelWindows]  # of each split
    end: int  # of the window
    growth: RowGrowth | None = None  # of the newest rows, where the schema has changed since

    def open_old_rows(self, split: str) -> NewestRows:
        """Return the newest rows of the tasks of a split, from before the window."""
        return open_newest_rows(self.state, split, self.job.schema, self.growth)


class BucketResult(NamedTuple):
    """A bucket's shard, the newest rows of all its tasks, and its new and returning tasks."""

    shard: WrittenShard
    newest: EncodedRows
    num_rows: int  # of the window
    lost: Counter[str]  # of them, what is in no episode
    new: int
    returning: int
    labels: LabelCounts


@dataclass(frozen=True)
class WrittenWindow:
    """What the shards of an increment hold."""

    dropped: DroppedRows
    use: HashedTableUse
    tasks: dict[str, dict[str, int]]  # of each split: new ones, and returning ones
    rows: Counter[str]  # of the window: in episodes by split, and why others are in none
    labels: dict[str, LabelCounts]  # of each split


class Engine(Protocol):
    """Reads the rows of the inputs, each time anew."""

    def describe_files(self, names: list[str]) -> list[InputFile]:
        """Return the files with their hashes."""

    def summarise(self, context: SummaryContext, report_progress: Progress) -> WindowSummary:
        """Return what all rows hold."""

    def write(
        self,
        window: WindowJob,
        tables: dict[str, Numbering],
        events: "WindowEvents",
        writer: DatasetWriter,
        state_folder: Path,
        report_progress: Progress,
    ) -> WrittenWindow:
        """Encode all rows, and events of another log, by `tables`; write shards, and to
        `state_folder` the newest rows."""


class LocalEngine:
    """The rows of a source, dealt to buckets on the disk."""

    def __init__(self, source: DuckSource, schema: Schema, options: PrepareOptions) -> None:
        self._source, self._schema, self._options = source, schema, options

    def describe_files(self, names: list[str]) -> list[InputFile]:
        """Return the files with their hashes."""
        return [hash_file(name) for name in names]

    def summarise(self, context: SummaryContext, report_progress: Progress) -> WindowSummary:
        """Return what all rows hold, summarised batch by batch in several threads."""
        # survey() refuses nulls, and values that a type would cut, before any row is summarised.
        done, total = 0, self._source.survey()
        summary = WindowSummary(num_read=total)

        def summarise_batch_rows(batch: pa.RecordBatch) -> tuple[int, WindowSummary]:
            return batch.num_rows, summarise_batch(context, batch)

        batches = self._source.batches(self._schema.columns)
        for num_rows, part in map_in_order(self._options.threads, summarise_batch_rows, batches):
            summary.add(part, context.admissions)
            done += num_rows
            report_progress("looking", done, total)
        return summary

    def write(
        self,
        window: WindowJob,
        tables: dict[str, Numbering],
        events: "WindowEvents",
        writer: DatasetWriter,
        state_folder: Path,
        report_progress: Progress,
    ) -> WrittenWindow:
        """Encode all rows into bucket files, then write the shards bucket by bucket."""
        job, options = window.job, self._options
        # Inside the unfinished increment: on the same disk, and removed with it.
        spool = Spool(writer.folder / ".spool", job.schema, job.plan)
        self._encode(window, tables, events, spool, report_progress)
        use = HashedTableUse(job)

        def buckets_of(split: str, buckets: range) -> Iterator[BucketResult]:
            old_rows = window.open_old_rows(split)

            def write(bucket: int) -> BucketResult:
                rows = spool.pop_bucket(bucket)
                return write_bucket(window, writer.folder, bucket, rows, old_rows, use)

            largest = max(spool.num_bytes(bucket) for bucket in buckets)
            # Earlier rows are read with their bucket; about evenly, since buckets are ranges of a
            # hash.
            largest += old_rows.num_bytes // len(buckets)
            threads = count_parallel_buckets(options.memory_bytes, options.threads, largest)
            return map_in_order(threads, write, buckets)

        written = adopt_buckets(window, writer, state_folder, buckets_of, use, report_progress)
        spool.close()
        return written

    def _encode(
        self,
        window: WindowJob,
        tables: dict[str, Numbering],
        events: "WindowEvents",
        spool: Spool,
        report_progress: Progress,
    ) -> None:
        job, done = window.job, 0
        encoder = Encoder(job.schema, job.fitted, tables)

        def encode(batch: pa.RecordBatch) -> EncodedRows:
            return encode_window_rows(encoder, window.screen, batch)

        batches = self._source.batches(self._schema.columns)
        for rows in map_in_order(self._options.threads, encode, batches):
            spool.append(rows)
            done += rows.num_rows
            report_progress("encoding", done, window.num_rows)
        of_events = EventRowEncoder(encoder)
        for rows in map_in_order(self._options.threads, of_events.encode, events.read()):
            spool.append(rows)
        spool.flush()


def write_bucket(
    window: WindowJob, folder: Path, bucket: int, rows: EncodedRows, old_rows: NewestRows, use: Use
) -> BucketResult:
    """Write the rows of a bucket below `folder` as a shard, and count its ids in `use`."""
    job, schema = window.job, window.job.schema
    split = job.plan.find_split(bucket)
    labels = window.labels[job.fitted.splits.names[split]]
    kept, buckets = _find_kept_rows(window, labels), job.plan.list_buckets(split)
    old = old_rows.read_bucket(bucket - buckets.start, len(buckets))
    old, old_events = _take_events(schema, old)
    rows, events = _take_events(schema, rows)
    clock = window.screen.clock
    if clock.start is not None and (is_past_N := old.time_N < clock.start).sum() < old.num_rows:
        old = select_rows(old, np.flatnonzero(is_past_N))  # a person set the window back
    old = clear_freed_ids(schema, drop_old_rows(old, clock.forget_before), window.freed)
    # Query rows of their own window are support in all later ones.
    old = replace(old, side_NS=np.full_like(old.side_NS, SUPPORT))
    # Most tasks of a long history are not in the window: their rows pass through unchanged.
    ripe = old.task_hash_N[labels.find_ripe(old)]
    past, waiting = split_by_tasks(old, np.unique(np.concatenate([rows.task_hash_N, ripe])))
    merged = merge_rows(schema, labels, past, rows)
    newest = kept.select(schema, merged.rows)
    newest = merge_in_task_order(schema, old, waiting, newest)
    counts = labels.count(schema, merged, newest)
    if clock.is_backfill:
        # A row of its time that the stream has was learnt: it is no query row again.
        is_past_N = merged.rows.time_N < labels.first.start
        shown = select_rows(merged.rows, np.flatnonzero(merged.is_new_N | is_past_N))
        merged = replace(merged, rows=shown)
    cut = [_cut_window(schema, one.mask(merged), one, kept) for one in labels.windows]
    parts = cut
    if schema.event_files:
        events = concatenate_rows(schema, [old_events, events])
        events = clear_freed_ids(schema, drop_old_rows(events, clock.forget_before), window.freed)
        parts = [_with_events(schema, one, events) for one in cut]
        delay = 0 if job.clock is None else job.clock.delay
        least = window.end - clock.late
        newest = add_events(schema, newest, events, least, delay)
    shard = job.write_shard(folder, bucket, parts, use, labels.hidden)
    episodes, side_N = cut[0], cut[0].side_NS[:, 0]
    present, task_N = np.unique(episodes.task_hash_N, return_inverse=True)
    # Tasks of the window that have earlier rows.
    returning = len(np.unique(episodes.task_hash_N[side_N != QUERY]))
    num_query, lost = int((side_N == QUERY).sum()), Counter[str]()
    if shard.num_query_side < num_query:
        length_T = np.bincount(task_N, side_N != EVENT_ONLY)
        is_short_N = (length_T < schema.episodes.min_rows)[task_N]
        lost["short_tasks"] = int((is_short_N & (side_N == QUERY)).sum())
        lost["left_out"] = num_query - shard.num_query_side - lost["short_tasks"]
    lost.update(labels.account(merged, num_query))
    return BucketResult(
        shard, newest, rows.num_rows, lost, len(present) - returning, returning, counts
    )


def _take_events(schema: Schema, rows: EncodedRows) -> tuple[EncodedRows, EncodedRows]:
    """Return the rows, and the events of another log among them."""
    is_event_N = (
        rows.is_event[:, 0] > 0 if schema.event_files else np.zeros(rows.num_rows, np.bool_)
    )
    if not is_event_N.any():
        return rows, select_rows(rows, np.zeros(0, np.int64))
    own, events = np.flatnonzero(~is_event_N), np.flatnonzero(is_event_N)
    return select_rows(rows, own), select_rows(rows, events)


def _with_events(schema: Schema, rows: EncodedRows, events: EncodedRows) -> EncodedRows:
    """Return the rows of a window, and the events of their tasks."""
    of_tasks = np.flatnonzero(np.isin(events.task_hash_N, rows.task_hash_N))
    return concatenate_rows(schema, [rows, select_rows(events, of_tasks)])


def _find_kept_rows(window: WindowJob, labels: LabelWindows) -> KeptRows:
    support, schema = find_stream_rule(window.job.schema).support, window.job.schema
    kept = KeptRows(support, waits_from=labels.waits_from)
    if schema.events is None or schema.event_files:
        return kept
    assert window.job.clock is not None  # of every schema with [events]
    delay, late = window.job.clock.delay, window.screen.clock.late
    return replace(kept, longest=schema.events.longest, delay=delay, late=late)


def _cut_window(
    schema: Schema, rows: EncodedRows, window: LabelWindow, kept: KeptRows
) -> EncodedRows:
    """Return the rows of the tasks that a window has, with their sides: the window's own are query,
    the newest before it support, others, which are events alone, only where there are events."""
    is_present_N = np.isin(rows.task_hash_N, window.find_tasks(rows))
    is_query_N = window.contains(rows) & is_present_N
    is_past_N = (rows.time_N < window.start) & is_present_N
    side_N = np.full(rows.num_rows, -1, np.int8)
    side_N[is_query_N] = QUERY
    if schema.events is not None and not schema.event_files:
        side_N[is_past_N] = EVENT_ONLY
    past = np.flatnonzero(is_past_N & (rows.time_N < window.support_before))
    side_N[past[kept.find_support(schema, select_rows(rows, past))]] = SUPPORT
    own = rows if side_N.min(initial=0) >= 0 else select_rows(rows, np.flatnonzero(side_N >= 0))
    return replace(own, side_NS=side_N[side_N >= 0][:, None])


def adopt_buckets(
    window: WindowJob,
    writer: DatasetWriter,
    state_folder: Path,
    buckets_of: Callable[[str, range], Iterable[BucketResult]],
    use: HashedTableUse,
    report_progress: Progress,
) -> WrittenWindow:
    """Adopt the shards of all buckets in order, and write the newest rows of all tasks."""
    job, dropped, tasks, done = window.job, DroppedRows(), {}, 0
    rows, labels = Counter[str](), {}
    for index, name in enumerate(job.fitted.splits.names):
        new, returning, num_episodes, labels[name] = 0, 0, 0, LabelCounts()
        with NewestRowsWriter(name_rows_file(state_folder, name), job.schema) as kept:
            # In order, since shards and newest rows of a split are sorted by task hash.
            for bucket in buckets_of(name, job.plan.list_buckets(index)):
                kept.append(bucket.newest)
                writer.adopt_shard(name, bucket.shard.entry, bucket.shard.block_table)
                dropped += bucket.shard.dropped
                rows.update({name: bucket.shard.num_query_side, **bucket.lost})
                labels[name].update(bucket.labels)
                num_episodes += bucket.shard.entry.num_episodes
                new, returning = new + bucket.new, returning + bucket.returning
                done += bucket.num_rows
                report_progress("writing", done, window.num_rows)
        # The gate may be empty; without training episodes there is no increment.
        if index == 0:
            window.labels[name].check_ripe(rows, window.job.schema)
            check_not_empty(num_episodes, dropped)
        tasks[name] = {"new": new, "returning": returning}
    return WrittenWindow(dropped, use, tasks, rows, labels)
