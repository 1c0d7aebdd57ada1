"""Who makes shards of an increment's rows: one machine here, Spark in spark_engine.py.

Both deal the rows to buckets, join each bucket with the earlier rows of its tasks, and adopt its
shard."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from metaio.format.dataset_writer import DatasetWriter
from metaio.prepare.episodes.cut_episodes import DroppedRows, check_not_empty
from metaio.prepare.episodes.encode import Encoder
from metaio.prepare.episodes.encoded_rows import EncodedRows, concatenate_rows, select_rows
from metaio.prepare.episodes.event_rows import EventEncoder
from metaio.prepare.episodes.ordered_map import Progress, count_parallel_buckets, map_in_order
from metaio.prepare.episodes.spool import Spool, split_by_bucket
from metaio.prepare.job import HashedTableUse, Job, PrepareOptions, Use, WrittenShard
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.side_columns import EVENT_ONLY, QUERY, SUPPORT
from metaio.prepare.source.source import DuckSource, EventBatches
from metaio.ragged import Int64
from metaio.stream.newest_rows import (
    KeptRows,
    NewestRows,
    NewestRowsWriter,
    clear_freed_ids,
    drop_old_rows,
    merge_in_task_order,
    split_by_tasks,
)
from metaio.stream.numbering import Numbering
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


@dataclass(frozen=True)
class WindowJob:
    """What all buckets of a window have in common; it is sent to every worker of a cluster."""

    job: Job
    screen: RowScreen
    # By table, the rows that lost their value.
    freed: dict[str, Int64]
    state: Path | None  # of the increment before, where there is one
    num_rows: int
    end: int  # of the window

    def open_old_rows(self, split: str) -> NewestRows:
        """Return the newest rows of the tasks of a split, from before the window."""
        return open_newest_rows(self.state, split, self.job.schema)


class BucketResult(NamedTuple):
    """A bucket's shard, the newest rows of all its tasks, and its new and returning tasks."""

    shard: WrittenShard
    newest: EncodedRows
    num_rows: int  # of the window
    lost: Counter[str]  # of them, what is in no episode
    new: int
    returning: int


@dataclass(frozen=True)
class WrittenWindow:
    """What the shards of an increment hold."""

    dropped: DroppedRows
    use: HashedTableUse
    tasks: dict[str, dict[str, int]]  # of each split: new ones, and returning ones
    rows: Counter[str]  # of the window: in episodes by split, and why others are in none


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
        events: EventBatches,
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
        events: EventBatches,
        writer: DatasetWriter,
        state_folder: Path,
        report_progress: Progress,
    ) -> WrittenWindow:
        """Encode all rows into bucket files, then write the shards bucket by bucket."""
        job, options = window.job, self._options
        # Inside the unfinished increment: on the same disk, and removed with it.
        spool = Spool(writer.folder / ".spool", job.schema)
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
        events: EventBatches,
        spool: Spool,
        report_progress: Progress,
    ) -> None:
        job, done = window.job, 0
        encoder = Encoder(job.schema, job.fitted, tables)

        def encode(batch: pa.RecordBatch) -> tuple[int, list[tuple[int, EncodedRows]]]:
            rows = encode_window_rows(encoder, window.screen, batch)
            return rows.num_rows, split_by_bucket(job.plan, rows)

        batches = self._source.batches(self._schema.columns)
        for num_rows, parts in map_in_order(self._options.threads, encode, batches):
            spool.append(parts)
            done += num_rows
            report_progress("encoding", done, window.num_rows)
        of_events = EventEncoder(encoder)
        for parts in map_in_order(
            self._options.threads,
            lambda batch: split_by_bucket(job.plan, of_events.encode(batch)),
            events(),
        ):
            spool.append(parts)
        spool.flush()


def write_bucket(
    window: WindowJob, folder: Path, bucket: int, rows: EncodedRows, old_rows: NewestRows, use: Use
) -> BucketResult:
    """Write the rows of a bucket below `folder` as a shard, and count its ids in `use`."""
    job, schema = window.job, window.job.schema
    kept = _find_kept_rows(window)
    buckets = job.plan.list_buckets(job.plan.find_split(bucket))
    # Most tasks of a long history are not in the window: their rows pass through unchanged.
    touched = np.unique(rows.task_hash_N)
    old = old_rows.read_bucket(bucket - buckets.start, len(buckets))
    clock = window.screen.clock
    # Query rows of their own window are support in all later ones.
    old = kept.set_past_sides(old)
    if clock.start is not None:
        is_past_N = (old.time_N < clock.start) | (old.side_NS[:, 0] == EVENT_ONLY)
        if not is_past_N.all():
            old = select_rows(old, np.flatnonzero(is_past_N))  # a person set the window back
    old = clear_freed_ids(schema, drop_old_rows(old, clock.forget_before), window.freed)
    past, waiting = split_by_tasks(old, touched)
    late_N = rows.side_NS[:, 0] == SUPPORT
    if late_N.any():  # they are from before the window, as all support is
        late = select_rows(rows, np.flatnonzero(late_N))
        past = kept.select(schema, concatenate_rows(schema, [past, late]))
        rows = select_rows(rows, np.flatnonzero(~late_N))
    episodes = concatenate_rows(schema, [past, rows])
    # Before tasks that have late rows alone are left out: these rows count as their newest.
    newest = kept.select(schema, episodes)
    in_window_N = rows.side_NS[:, 0] == QUERY  # others are events alone
    num_rows, present = int(in_window_N.sum()), np.unique(rows.task_hash_N[in_window_N])
    if len(present) < len(touched):  # all rows of the others were late, or events alone
        past, _ = split_by_tasks(past, present)
        episodes = concatenate_rows(schema, [past, rows])
    # Tasks of the window that have earlier rows.
    returning = len(np.unique(past.task_hash_N[past.side_NS[:, 0] == SUPPORT]))
    newest = merge_in_task_order(schema, old, waiting, newest)
    if schema.events is not None and not schema.event_files:
        episodes = _as_events(schema, episodes, kept)
    shard = job.write_shard(folder, bucket, episodes, use)
    lost = Counter[str]()
    if shard.num_query_side < num_rows:
        _, task_N = np.unique(episodes.task_hash_N, return_inverse=True)
        length_T = np.bincount(task_N, episodes.side_NS[:, 0] != EVENT_ONLY)
        is_short_N = (length_T < schema.episodes.min_rows)[task_N]
        lost["short_tasks"] = int((is_short_N & (episodes.side_NS[:, 0] == QUERY)).sum())
        lost["left_out"] = num_rows - shard.num_query_side - lost["short_tasks"]
    return BucketResult(shard, newest, num_rows, lost, len(present) - returning, returning)


def _find_kept_rows(window: WindowJob) -> KeptRows:
    support, schema = find_stream_rule(window.job.schema).support, window.job.schema
    if schema.events is None:
        return KeptRows(support)
    assert window.job.clock is not None  # of every schema with [events]
    delay, late = window.job.clock.delay, window.screen.clock.late
    end = window.end if schema.event_files else None
    return KeptRows(support, schema.events.longest, delay, late, end)


def _as_events(schema: Schema, rows: EncodedRows, kept: KeptRows) -> EncodedRows:
    """Return the rows, of which those before the window that are no support are events alone."""
    side_NS = rows.side_NS.copy()
    past = np.flatnonzero(side_NS[:, 0] == SUPPORT)
    order = kept.find_support(schema, select_rows(rows, past))
    side_NS[past] = EVENT_ONLY
    side_NS[past[order]] = SUPPORT
    return replace(rows, side_NS=side_NS)


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
    rows = Counter[str]()
    for index, name in enumerate(job.fitted.splits.names):
        new, returning, num_episodes = 0, 0, 0
        with NewestRowsWriter(name_rows_file(state_folder, name), job.schema) as kept:
            # In order, since shards and newest rows of a split are sorted by task hash.
            for bucket in buckets_of(name, job.plan.list_buckets(index)):
                kept.append(bucket.newest)
                writer.adopt_shard(name, bucket.shard.entry, bucket.shard.block_table)
                dropped += bucket.shard.dropped
                rows.update({name: bucket.shard.num_query_side, **bucket.lost})
                num_episodes += bucket.shard.entry.num_episodes
                new, returning = new + bucket.new, returning + bucket.returning
                done += bucket.num_rows
                report_progress("writing", done, window.num_rows)
        # The gate may be empty; without training episodes there is no increment.
        if index == 0:
            check_not_empty(num_episodes, dropped)
        tasks[name] = {"new": new, "returning": returning}
    return WrittenWindow(dropped, use, tasks, rows)
