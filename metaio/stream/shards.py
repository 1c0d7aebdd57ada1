"""Buckets of a window become shards: each is joined with what is known of its tasks from before."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metaio.format.writer import DatasetWriter
from metaio.prepare.encoded_rows import EncodedRows, joined, take_rows
from metaio.prepare.episodes import Dropped, check_some
from metaio.prepare.in_order import Progress
from metaio.prepare.job import Job, TableUse, Use, WrittenShard
from metaio.prepare.sides import SUPPORT
from metaio.ragged import Int64
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
from metaio.stream.window import Clock, rule_of


@dataclass(frozen=True)
class Window:
    """What all buckets of a window have in common. It is sent to every worker of a cluster, without
    the values of its vocabularies.
    """

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
    are new and returning.
    """

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


def write_bucket(
    window: Window, folder: Path, bucket: int, rows: EncodedRows, old_rows: TaskRows, use: Use
) -> Bucket:
    """Write the rows of a bucket below `folder` as a shard, and count its ids in `use`.

    Safe to call from several threads, for different buckets.

    Raises:
        DataError: two rows of a task have one row id.
    """
    job, schema = window.job, window.job.schema
    most, buckets = rule_of(schema).support, job.plan.of_split(job.plan.split_of(bucket))
    # Most tasks of a long history are not in the window: their rows pass as they stand.
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
    folder of the state; `buckets_of` gives those of a split.

    Raises:
        DataError: no task of the train split has an episode.
    """
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
