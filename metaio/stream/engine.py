"""Who makes shards of an increment's rows: one machine here, Spark in spark.py. Both deal the rows
to buckets, join each bucket with what is known of its tasks from before, and adopt its shard.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from metaio.format.writer import DatasetWriter
from metaio.prepare.encode import Encoder
from metaio.prepare.encoded_rows import EncodedRows, joined, take_rows
from metaio.prepare.episodes import Dropped, check_some
from metaio.prepare.in_order import Progress, buckets_at_once, map_in_order
from metaio.prepare.job import Job, PrepareOptions, TableUse, Use, WrittenShard
from metaio.prepare.schema import Schema
from metaio.prepare.sides import SUPPORT
from metaio.prepare.source import DuckSource
from metaio.prepare.spool import Spool, split_by_bucket
from metaio.ragged import Int64
from metaio.stream.inputs import InputFile, described
from metaio.stream.numbering import Numbering
from metaio.stream.state import rows_file, task_rows
from metaio.stream.task_rows import (
    TaskRows,
    TaskRowsWriter,
    forget_rows,
    in_task_order,
    newest_rows,
    rows_of_tasks,
    without_freed,
)
from metaio.stream.window import Clock, Look, Looking, encoded, look_at, rule_of


@dataclass(frozen=True)
class Window:
    """What all buckets of a window have in common. It is sent to every worker of a cluster, without
    the values of its vocabularies."""

    job: Job
    clock: Clock
    freed: dict[str, Int64]  # by table: rows that lost their value
    state: Path | None  # of the increment before, where there is one
    num_rows: int

    def old_rows(self, split: str) -> TaskRows:
        """Return the newest rows of the tasks of a split, from before the window."""
        return task_rows(self.state, split, self.job.schema)


class Bucket(NamedTuple):
    """A bucket's shard, the newest rows of all its tasks, and how many of its tasks in the window
    are new and returning."""

    shard: WrittenShard
    newest: EncodedRows
    num_rows: int  # of the window
    new: int
    returning: int


@dataclass(frozen=True)
class Written:
    """What the shards of an increment hold."""

    dropped: Dropped
    use: TableUse
    tasks: dict[str, dict[str, int]]  # of each split: new ones, and returning ones


class Engine(Protocol):
    """Reads the rows of the inputs, each time anew."""

    def described(self, names: list[str]) -> list[InputFile]:
        """Return the files with their hashes."""

    def look(self, looking: Looking, tell: Progress) -> Look:
        """Return what all rows hold."""

    def write(
        self,
        window: Window,
        tables: dict[str, Numbering],
        writer: DatasetWriter,
        state_folder: Path,
        tell: Progress,
    ) -> Written:
        """Encode all rows by the tables, which stand in the folder of the state too, and write
        shards, and to that folder the newest rows of all tasks. Raises DataError: the rows make no
        training episode, or two of a task have one row id."""


class OneMachine:
    """The rows of a source, dealt to buckets on the disk."""

    def __init__(self, source: DuckSource, schema: Schema, options: PrepareOptions) -> None:
        self._source, self._schema, self._options = source, schema, options

    def described(self, names: list[str]) -> list[InputFile]:
        """Return the files with their hashes, one after the other."""
        return [described(name) for name in names]

    def look(self, looking: Looking, tell: Progress) -> Look:
        """Return what all rows hold, looked at batch by batch in several threads."""
        look, done, total = Look(), 0, self._source.survey()

        def look_at_batch(batch: pa.RecordBatch) -> tuple[int, Look]:
            return batch.num_rows, look_at(looking, batch)

        batches = self._source.batches(self._schema.columns)
        for num_rows, part in map_in_order(self._options.threads, look_at_batch, batches):
            look.add(part, looking.admissions)
            done += num_rows
            tell("looking", done, total)
        return look

    def write(
        self,
        window: Window,
        tables: dict[str, Numbering],
        writer: DatasetWriter,
        state_folder: Path,
        tell: Progress,
    ) -> Written:
        """Encode all rows and spool them by bucket, then write the shards bucket by bucket."""
        job, options = window.job, self._options
        spool = Spool(writer.folder / ".spool", job.schema)
        self._encode(window, tables, spool, tell)
        use = TableUse(job)

        def buckets_of(split: str, buckets: range) -> Iterator[Bucket]:
            old_rows = window.old_rows(split)

            def write(bucket: int) -> Bucket:
                rows = spool.take(bucket)
                return write_bucket(window, writer.folder, bucket, rows, old_rows, use)

            largest = max(spool.num_bytes(bucket) for bucket in buckets)
            largest += old_rows.num_bytes // len(buckets)
            threads = buckets_at_once(options.memory_bytes, options.threads, largest)
            return map_in_order(threads, write, buckets)

        written = adopt_buckets(window, writer, state_folder, buckets_of, use, tell)
        spool.close()
        return written

    def _encode(
        self, window: Window, tables: dict[str, Numbering], spool: Spool, tell: Progress
    ) -> None:
        job, clock, done = window.job, window.clock, 0
        encoder = Encoder(job.schema, job.fitted, tables)

        def encode(batch: pa.RecordBatch) -> tuple[int, list[tuple[int, EncodedRows]]]:
            rows = encoded(encoder, clock, batch)
            return rows.num_rows, split_by_bucket(job.plan, rows)

        batches = self._source.batches(self._schema.columns)
        for num_rows, parts in map_in_order(self._options.threads, encode, batches):
            spool.append(parts)
            done += num_rows
            tell("encoding", done, window.num_rows)
        spool.flush()


def write_bucket(
    window: Window, folder: Path, bucket: int, rows: EncodedRows, old_rows: TaskRows, use: Use
) -> Bucket:
    """Write the rows of a bucket below `folder` as a shard, and count its ids in `use`.

    Safe to call from several threads, for different buckets. Raises DataError: two rows of a task
    have one row id.
    """
    job, schema = window.job, window.job.schema
    most, buckets = rule_of(schema).support, job.plan.of_split(job.plan.split_of(bucket))
    # Most tasks of a long history are not in the window: their rows pass through unchanged.
    touched = np.unique(rows.task_hash_N)
    old = old_rows.of_bucket(bucket - buckets.start, len(buckets))
    old = without_freed(schema, forget_rows(old, window.clock.forget_before), window.freed)
    old = replace(old, side_NS=np.full_like(old.side_NS, SUPPORT))
    past, waiting = rows_of_tasks(old, touched)
    late_N = rows.side_NS[:, 0] == SUPPORT
    if late_N.any():  # they are from before the window, as all support is
        late = take_rows(rows, np.flatnonzero(late_N))
        past = newest_rows(schema, joined(schema, [past, late]), most)
        rows = take_rows(rows, np.flatnonzero(~late_N))
    episodes = joined(schema, [past, rows])
    newest = newest_rows(schema, episodes, most)
    present = np.unique(rows.task_hash_N)
    if len(present) < len(touched):  # all rows of the others were late
        past, _ = rows_of_tasks(past, present)
        episodes = joined(schema, [past, rows])
    returning = len(np.unique(past.task_hash_N))
    newest = in_task_order(schema, old, waiting, newest)
    shard = job.write_shard(folder, bucket, episodes, use)
    return Bucket(shard, newest, rows.num_rows, len(present) - returning, returning)


def adopt_buckets(
    window: Window,
    writer: DatasetWriter,
    state_folder: Path,
    buckets_of: Callable[[str, range], Iterable[Bucket]],
    use: TableUse,
    tell: Progress,
) -> Written:
    """Adopt the shards of all buckets, in order, and write the newest rows of all tasks to the
    folder of the state; `buckets_of` gives those of a split. Raises DataError: no task of the train
    split has an episode."""
    job, dropped, tasks, done = window.job, Dropped(), {}, 0
    for index, name in enumerate(job.fitted.splits.names):
        new, returning, num_episodes = 0, 0, 0
        with TaskRowsWriter(rows_file(state_folder, name), job.schema) as kept:
            for bucket in buckets_of(name, job.plan.of_split(index)):
                kept.append(bucket.newest)
                writer.adopt_shard(name, bucket.shard.entry, bucket.shard.block_table)
                dropped += bucket.shard.dropped
                num_episodes += bucket.shard.entry.num_episodes
                new, returning = new + bucket.new, returning + bucket.returning
                done += bucket.num_rows
                tell("writing", done, window.num_rows)
        if index == 0:
            check_some(num_episodes, dropped)
        tasks[name] = {"new": new, "returning": returning}
    return Written(dropped, use, tasks)
