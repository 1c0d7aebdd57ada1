"""Rows of an old partition become an increment of their own, but for those that the stream has."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from metaio.errors import DataError
from metaio.hashing import UInt64, splitmix64
from metaio.prepare.schema.schema import Schema
from metaio.stream.chain import format_event_time, open_stream
from metaio.stream.description import OpenedStream
from metaio.stream.window import SummaryContext, WindowSummary, hash_row_keys


def check_backfill(before: OpenedStream) -> None:
    """Raise DataError where a stream takes no rows from before its window."""
    schema, wrong = before.schema, ""
    if before.state.end is None:
        wrong = "is the first increment, which takes rows of any time. Leave it out"
    elif schema.row_id is None:
        wrong = "needs [row_id], by which rows that the stream has are known. Begin a new stream"
    elif any(label.matures is not None for label in schema.labels):
        wrong = "is not for labels that mature: later rows correct those that wait. Leave it out"
    elif schema.events is not None:
        wrong = "is not for [events]: rows that were learnt do not know them. Leave it out"
    if wrong:
        raise DataError(f"--backfill of {before.root} {wrong}")


def find_known_rows(
    before: OpenedStream, context: SummaryContext, summary: WindowSummary
) -> SummaryContext:
    """Return the context that leaves out the rows that the stream has. Raises DataError: some rows
    are no older than its window."""
    end, unit = before.state.end, context.screen.clock.unit
    assert end is not None
    if summary.num_rows and summary.most_time >= end:
        raise DataError(
            f"--backfill was given rows up to {format_event_time(summary.most_time, unit)}; the "
            f"next window begins at {format_event_time(end, unit)}, and only older ones are "
            "allowed. Give newer files without it"
        )
    # Each key once, as few as can be: workers of a cluster get them too.
    keys = [np.unique(key_N) for key_N in _iterate_keys(before, before.schema, summary.least_time)]
    known = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.uint64)
    screen = replace(context.screen, known=known if len(known) else None)
    return replace(context, screen=screen)


def _iterate_keys(before: OpenedStream, schema: Schema, least_time: int) -> Iterator[UInt64]:
    """Yield the keys of the rows of all increments that end behind `least_time`, and of the newest
    rows of all tasks, among which are those of no episode."""
    stream = open_stream(str(before.root))
    for record in stream.records:
        if record.window[1] > least_time:
            dataset = stream.dataset(record.number)
            for split, entry in dataset.splits.items():
                for index in range(entry.num_blocks):
                    block: Any = dataset.read_block(split, index)
                    lengths_T = np.diff(block.row_offsets_T1)
                    hash_T = splitmix64(block.task_T.view(np.uint64))
                    yield hash_row_keys(np.repeat(hash_T, lengths_T), block.row_id_N)
    for split in ("train", "gate"):
        rows = before.state.open_newest_rows(split, before.stored)
        for hash_N, row_id_N in rows.iterate_row_ids():
            yield hash_row_keys(hash_N, row_id_N)


def check_new(summary: WindowSummary, names: str) -> None:
    """Raise DataError where the stream has all rows that were given."""
    if not summary.num_rows:
        raise DataError(
            f"--backfill was given {names}, of whose {summary.num_known:,} rows the stream has all:"
            " there is nothing to learn. Leave them out"
        )
