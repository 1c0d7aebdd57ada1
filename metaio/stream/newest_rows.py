"""The newest rows of every task, encoded, as the support of later windows.

One Arrow file a split, sorted by the hashes of the tasks, so that the rows of a bucket are one
range: read by mapping, written bucket by bucket."""

# Ids keep the rows that they had when they were written: values that waited for admission then stay
# unknown here.
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaio.format.block import find_features_of_values
from metaio.hashing import UInt64
from metaio.prepare.episodes.encoded_rows import (
    EncodedRows,
    allocate_rows,
    concatenate_rows,
    list_array_types,
    select_rows,
)
from metaio.prepare.episodes.row_order import hash_row_identity, sort_rows
from metaio.prepare.schema.schema import Schema
from metaio.ragged import Int64, find_run_starts, offsets, places, ragged_indices, sum_rows

if TYPE_CHECKING:
    from metaio.stream.row_growth import RowGrowth


@dataclass(frozen=True)
class KeptRows:
    """Which rows of a task later windows need: its newest ones as support, and older events."""

    support: int
    longest: int | None = None  # newest events before each row; 0: all; None: no row knows any
    delay: int = 0  # of events, in ticks
    late: int = 0  # ticks by which a row may come behind its window
    waits_from: int | None = None  # rows from there on are kept: some labels are not ripe

    def select(self, schema: Schema, rows: EncodedRows) -> EncodedRows:
        """Return the rows that are kept, tasks in the order of their hash."""
        order_N, is_support_N, is_needed_N = self._order(schema, rows, self.waits_from)
        return select_rows(rows, order_N[is_support_N | is_needed_N])

    def find_support(self, schema: Schema, rows: EncodedRows) -> Int64:
        """Return the newest `support` rows of each task."""
        order_N, is_support_N, _ = self._order(schema, rows, None)
        return order_N[is_support_N]

    def _order(
        self, schema: Schema, rows: EncodedRows, waits_from: int | None
    ) -> tuple[Int64, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return the order by task and time, which rows in it are support or wait, and which are
        events that support rows or rows to come know."""
        order_N = sort_rows(schema, rows, hash_row_identity(schema, rows), True)
        time_N, task_N = rows.time_N[order_N], rows.task_hash_N[order_N]
        starts_T = np.flatnonzero(find_run_starts(task_N))
        lengths_T = np.diff(starts_T, append=len(task_N))
        stops_T = starts_T + lengths_T
        if waits_from is not None and len(starts_T):
            stops_T = stops_T - np.add.reduceat((time_N >= waits_from).astype(np.int64), starts_T)
        is_support_N = np.repeat(stops_T, lengths_T) - np.arange(len(task_N)) <= self.support
        if self.longest is None:
            return order_N, is_support_N, np.zeros_like(is_support_N)
        is_event_N = np.ones_like(is_support_N)
        if rows.is_event.shape[1]:
            is_event_N = rows.is_event[order_N, 0] > 0
        if not self.longest:
            return order_N, is_support_N, is_event_N
        # The oldest row that still asks is a support row, or one to come that is late.
        asks_T = np.minimum(
            time_N[np.maximum(stops_T - self.support, starts_T)], time_N[stops_T - 1] - self.late
        )
        is_older_N = is_event_N & (time_N < np.repeat(asks_T - self.delay, lengths_T))
        counts_N1 = offsets(is_older_N)
        newer_N = np.repeat(counts_N1[stops_T], lengths_T) - counts_N1[:-1]
        return order_N, is_support_N, is_event_N & (~is_older_N | (newer_N <= self.longest))


def add_events(
    schema: Schema, rows: EncodedRows, events: EncodedRows, next_time: int, delay: int
) -> EncodedRows:
    """Return kept rows with the events of another log that they know, or rows to come from
    `next_time` on, tasks in the order of their hash; `delay` in ticks."""
    both = concatenate_rows(schema, [rows, events])
    first = rows.num_rows
    tasks, task_N = np.unique(both.task_hash_N, return_inverse=True)
    asks_T = np.full(len(tasks), next_time)
    np.minimum.at(asks_T, task_N[:first], rows.time_N)
    order_N = np.lexsort((events.row_hash_N, events.time_N, task_N[first:])) + first
    is_older_N = both.time_N[order_N] < asks_T[task_N[order_N]] - delay
    older = order_N[is_older_N]
    longest = schema.events.longest if schema.events is not None else 0
    if longest:
        lengths_T = np.bincount(task_N[older])
        newer_N = np.repeat(lengths_T, lengths_T) - places(lengths_T)
        older = older[newer_N <= longest]
    chosen = np.concatenate([np.arange(first), older, order_N[~is_older_N]])
    return select_rows(both, chosen[np.argsort(both.task_hash_N[chosen], kind="stable")])


def split_by_tasks(rows: EncodedRows, task_hashes: UInt64) -> tuple[EncodedRows, Int64]:
    """Return the rows of these tasks, in their order, and the indexes of all others."""
    is_theirs_N = np.isin(rows.task_hash_N, task_hashes)
    return select_rows(rows, np.flatnonzero(is_theirs_N)), np.flatnonzero(~is_theirs_N)


def merge_in_task_order(
    schema: Schema, old: EncodedRows, waiting: Int64, newest: EncodedRows
) -> EncodedRows:
    """Return `old` rows at the indexes `waiting` and all `newest` rows, merged by task hash."""
    # Both are sorted by task hash, and have no task in common.
    hash_N = np.concatenate([old.task_hash_N[waiting], newest.task_hash_N])
    is_new_N = np.argsort(hash_N, kind="stable") >= len(waiting)
    old_offsets, new_offsets = (offsets(sum_rows(one.lengths_NM)) for one in (old, newest))
    lengths_N = np.empty(len(hash_N), np.int64)
    lengths_N[~is_new_N] = lengths = np.diff(old_offsets)[waiting]
    lengths_N[is_new_N] = np.diff(new_offsets)
    is_new_V = np.repeat(is_new_N, lengths_N)
    found = allocate_rows(schema, len(hash_N), len(is_new_V))
    places_N, places_V = (np.zeros(len(each), np.int64) for each in (is_new_N, is_new_V))
    places_N[~is_new_N] = waiting
    places_V[~is_new_V] = ragged_indices(old_offsets[waiting], lengths)
    for name, array in vars(found).items():
        is_new, places = (is_new_V, places_V) if name == "values_V" else (is_new_N, places_N)
        kept = getattr(old, name)
        if len(waiting) and len(kept):  # lists may all be empty
            # Copied once, since most tasks wait; "clip" writes straight to `out`.
            np.take(kept, places, axis=0, out=array, mode="clip")
        array[is_new] = getattr(newest, name)
    return found


class NewestRowsWriter:
    """Writes the rows of a split, which come in the order of the tasks' hashes."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._schema = _make_arrow_schema(list_array_types(schema))
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def append(self, rows: EncodedRows) -> None:
        """Write the rows of the next tasks."""
        if rows.num_rows:
            columns = [_to_arrow(name, rows) for name in self._schema.names]
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._writer.close()
        self._file.close()


class NewestRows:
    """The stored rows of a split, read when they are needed."""

    def __init__(
        self, path: Path | None, schema: Schema, growth: "RowGrowth | None" = None
    ) -> None:
        """Open the file `path`, written by `schema`, or by that which `growth` leads from."""
        self._schema, self._growth = schema, growth
        self._batches: list[pa.RecordBatch] = []
        if path is not None:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]

    @property
    def num_rows(self) -> int:
        """Return the number of rows of all tasks."""
        return sum(batch.num_rows for batch in self._batches)

    @property
    def num_bytes(self) -> int:
        """Return their size in memory, once read."""
        return sum(batch.nbytes for batch in self._batches)

    def iterate_row_ids(self) -> Iterator[tuple[UInt64, Int64]]:
        """Yield the hashes of the tasks and the [row_id]s of all rows [N], part by part."""
        for batch in self._batches:
            yield batch["task_hash_N"].to_numpy(), batch["row_id_NR"].flatten().to_numpy()

    def read_bucket(self, bucket: int, num_buckets: int) -> EncodedRows:
        """Return all rows of the tasks of a bucket (spool.assign_buckets), sorted by task hash."""
        first, stop = (-(-(b << 32) // num_buckets) << 32 for b in (bucket, bucket + 1))
        parts = list(self._read_between(first, stop))
        # Rows of a single batch stay mapped, not copied.
        return parts[0] if len(parts) == 1 else concatenate_rows(self._schema, parts)

    def _read_between(self, first: int, stop: int) -> Iterator[EncodedRows]:
        for batch in self._batches:
            hashes: UInt64 = batch["task_hash_N"].to_numpy()
            begin = int(np.searchsorted(hashes, np.uint64(first)))
            end = len(hashes) if stop >= 1 << 64 else int(np.searchsorted(hashes, np.uint64(stop)))
            if begin < end:
                rows, growth = batch.slice(begin, end - begin), self._growth
                if growth is None:
                    yield _from_arrow(rows, self._schema)
                else:
                    yield growth.grow(_from_arrow(rows, growth.stored))


def _make_arrow_schema(types: dict[str, tuple[np.dtype[Any], int | None]]) -> pa.Schema:
    fields = []
    for name, (dtype, width) in types.items():
        kind = pa.from_numpy_dtype(dtype)
        if name == "values_V":
            fields.append((name, pa.large_list(kind)))
        elif width is None:
            fields.append((name, kind))
        elif width:  # a list of no entries would say nothing
            fields.append((name, pa.list_(kind, width)))
    return pa.schema(fields)


def _to_arrow(name: str, rows: EncodedRows) -> pa.Array:
    array = getattr(rows, name)
    if name == "values_V":
        return pa.LargeListArray.from_arrays(offsets(sum_rows(rows.lengths_NM)), pa.array(array))
    if array.ndim == 1:
        return pa.array(array)
    return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])


def _from_arrow(batch: pa.RecordBatch, schema: Schema) -> EncodedRows:
    arrays = {}
    for name, (dtype, width) in list_array_types(schema).items():
        if name not in batch.schema.names:
            arrays[name] = np.empty((batch.num_rows, 0), dtype)
            continue
        column = batch[name]
        flat = column if width is None and name != "values_V" else column.flatten()
        values = flat.to_numpy(zero_copy_only=False)
        arrays[name] = values if width is None else values.reshape(-1, width)
    return EncodedRows(**arrays)


def drop_old_rows(rows: EncodedRows, least_time: int | None) -> EncodedRows:
    """Return the rows from `least_time` on; all of them if it is None."""
    if least_time is None:
        return rows
    return select_rows(rows, np.flatnonzero(rows.time_N >= least_time))


def clear_freed_ids(schema: Schema, rows: EncodedRows, freed: dict[str, Int64]) -> EncodedRows:
    """Return the rows with ids that lost their value replaced by row 0 (unknown)."""
    if not any(len(own) for own in freed.values()):
        return rows
    # Copied, since rows that were mapped from a file cannot be written to.
    ids_NF, values_V = rows.ids_NF.copy(), rows.values_V.copy()
    for index, column in enumerate(schema.single):
        own = freed.get(column.table_name)
        if own is not None:
            ids_NF[np.isin(ids_NF[:, index], own), index] = 0
    feature_V = find_features_of_values(rows.lengths_NM)
    for index, column in enumerate(schema.multi):
        own = freed.get(column.table_name)
        if own is not None:
            values_V[(feature_V == index) & np.isin(values_V, own)] = 0
    return EncodedRows(**{**vars(rows), "ids_NF": ids_NF, "values_V": values_V})
