"""Buckets of a window become shards: each is joined with what is known of its tasks from before."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from metaio.format.writer import DatasetWriter
from metaio.prepare.encode import EncodedRows, joined, take_rows
from metaio.prepare.episodes import Dropped, check_some
from metaio.prepare.in_order import Progress, buckets_at_once, map_in_order
from metaio.prepare.job import Job, TableUse, WrittenShard
from metaio.prepare.sides import SUPPORT
from metaio.prepare.spool import Spool
from metaio.ragged import Int64
from metaio.stream.state import rows_file
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
class Written:
    """What the shards of an increment hold."""

    dropped: Dropped
    use: TableUse
    tasks: dict[str, dict[str, int]]  # of each split: new ones, and returning ones


def write_shards(
    job: Job,
    writer: DatasetWriter,
    spool: Spool,
    old_rows: dict[str, TaskRows],
    state_folder: Path,
    clock: Clock,
    freed: dict[str, Int64],
    tell: Progress,
    num_rows: int,
) -> Written:
    """Write all buckets as shards, and the newest rows of all tasks to the folder of the state.

    Raises:
        DataError: no task of the train split has an episode, or two of its rows have one row id.
    """
    dropped, use, tasks, done = Dropped(), TableUse(job), {}, 0
    schema, most = job.schema, rule_of(job.schema).support

    def past_rows(name: str, bucket: int, num_buckets: int) -> EncodedRows:
        rows = forget_rows(old_rows[name].of_bucket(bucket, num_buckets), clock.forget_before)
        rows = without_freed(schema, rows, freed)
        return replace(rows, side_NS=np.full_like(rows.side_NS, SUPPORT))

    for index, name in enumerate(job.fitted.splits.names):
        buckets = job.plan.of_split(index)

        def write(
            bucket: int, name: str = name, buckets: range = buckets
        ) -> tuple[WrittenShard, EncodedRows, int, int, int]:
            window = spool.take(bucket)
            # Most tasks of a long history are not in the window: their rows pass as they stand.
            touched = np.unique(window.task_hash_N)
            old = past_rows(name, bucket - buckets.start, len(buckets))
            past, waiting = rows_of_tasks(old, touched)
            late_N = window.side_NS[:, 0] == SUPPORT
            if late_N.any():  # they are from before the window, as all support is
                late = take_rows(window, np.flatnonzero(late_N))
                past = newest_rows(schema, joined(schema, [past, late]), most)
                window = take_rows(window, np.flatnonzero(~late_N))
            episodes = joined(schema, [past, window])
            newest = newest_rows(schema, episodes, most)
            present = np.unique(window.task_hash_N)
            if len(present) < len(touched):  # all rows of the others were late
                past, _ = rows_of_tasks(past, present)
                episodes = joined(schema, [past, window])
            returning = len(np.unique(past.task_hash_N))
            newest = in_task_order(schema, old, waiting, newest)
            shard = job.write_shard(writer.folder, bucket, episodes, use)
            return shard, newest, window.num_rows, len(present) - returning, returning

        counts, num_episodes = {"new": 0, "returning": 0}, 0
        largest = max(spool.num_bytes(bucket) for bucket in buckets)
        largest += old_rows[name].num_bytes // len(buckets)
        threads = buckets_at_once(job.options.memory_bytes, job.options.threads, largest)
        with TaskRowsWriter(rows_file(state_folder, name), schema) as kept:
            for shard, newest, own_rows, new, returning in map_in_order(threads, write, buckets):
                kept.append(newest)
                writer.adopt_shard(name, shard.entry, shard.block_table)
                dropped += shard.dropped
                num_episodes += shard.entry.num_episodes
                counts = {"new": counts["new"] + new, "returning": counts["returning"] + returning}
                done += own_rows
                tell("writing", done, num_rows)
        if index == 0:
            check_some(num_episodes, dropped)
        tasks[name] = counts
    return Written(dropped, use, tasks)
