"""Composes a TaskBatch of chosen episodes of decoded blocks: positions are renumbered, not hashed.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, B tables, U unique ids, E chosen episodes"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metaio.format.block import Block, Bundles, borrow_scratch, find_distinct
from metaio.format.features import Features
from metaio.ragged import Int32, Int64, index_entries, offsets, ragged_indices, sum_rows
from metaio.read.array_pool import ArrayPool
from metaio.read.batch import TaskBatch, empty_batch

# Columns whose values are copied unchanged.
_OF_ROWS = (
    "label_N", "dense_NK", "multi_lengths_NM", "row_id_N", "weight_N", "events_before_N",
)  # fmt: skip
_ROWS_AT_ONCE = 64


class _MarkedPositions(NamedTuple):
    """The distinct positions that chosen rows of a block use, and the rows' positions."""

    used: Int64
    single: Int64
    multi: Int64


class _Part(NamedTuple):
    """Chosen episodes of one block: their rows and values, and their range of `ids_U` by table."""

    block: Block
    rows: Int64 | slice
    values: Int64 | slice
    num_rows: int
    num_values: int
    ids_U: Int64
    starts_B: Int64
    lengths_B: Int64
    # None for a complete block or bundle, whose ids are known without a look at its rows.
    marked: _MarkedPositions | None = None


def compose(
    features: Features, parts: Sequence[tuple[Block, Int64]], memory: ArrayPool | None = None
) -> TaskBatch:
    """Return the batch of the episodes [E] of each block, which stands once, episodes ascending."""
    chosen = [(block, episodes_E) for block, episodes_E in parts if len(episodes_E)]
    if not chosen:
        num_single, num_multi = len(features.single), len(features.multi)
        num_dense, num_labels = len(features.dense), features.num_labels
        of_events = len(features.events), features.num_event_numbers
        num_tables = len(features.tables)
        return empty_batch(num_tables, num_single, num_multi, num_dense, num_labels, *of_events)
    # BlockOrder composes one block at a time: that costs ten views. Not of a block in bundles,
    # whose arrays may be views of its file.
    first, episodes_E = chosen[0]
    if len(chosen) == 1 and len(episodes_E) == first.num_episodes and first.bundles is None:
        batch = _compose_whole_block(first)
    else:
        batch = _join(features, chosen, memory or ArrayPool(keep=0))
    return _separate_events(features, batch) if features.events else batch


def _tensor(array: npt.NDArray[np.generic]) -> Tensor:
    # DLPack shares read-only Arrow memory without the warning of torch.from_numpy.
    return (
        torch.from_numpy(array) if array.flags.writeable else torch.utils.dlpack.from_dlpack(array)
    )


def _compose_whole_block(block: Block) -> TaskBatch:
    columns = {"unique_lengths_B": np.diff(block.unique_offsets_B1), **vars(block)}
    names = [own.name for own in fields(TaskBatch) if own.name in columns]
    return TaskBatch(**{name: _tensor(columns[name]) for name in names})


def _separate_events(features: Features, batch: TaskBatch) -> TaskBatch:
    """Return the batch with the ids of events out of the lists of its first rows."""
    lengths_of_events, num_multi = batch.multi_lengths_NM.numpy(), len(features.multi)
    num_columns, num_events_T = len(features.events), batch.num_events_T.numpy()
    first_T = batch.row_offsets_T1[:-1].numpy()
    # A served task may have no row, and then no event: what its first would be does not matter.
    first_T = np.minimum(first_T, max(len(lengths_of_events) - 1, 0))
    lengths_of_events = (
        lengths_of_events
        if len(lengths_of_events)
        else np.zeros((1, lengths_of_events.shape[1]), np.int32)
    )
    values_T = offsets(sum_rows(lengths_of_events))[first_T] + sum_rows(
        lengths_of_events[first_T, :num_multi]
    )
    # Column by column, as a row's lists stand one after another.
    starts_TM = values_T[:, None] + num_events_T[:, None] * np.arange(num_columns)
    events_of_columns = [ragged_indices(start_T, num_events_T) for start_T in starts_TM.T]
    kept_V = np.ones(len(batch.multi_positions_V), np.bool_)
    for index_E in events_of_columns:
        kept_V[index_E] = False
    positions_V = batch.multi_positions_V
    return replace(
        batch,
        multi_positions_V=positions_V[torch.from_numpy(kept_V)],
        multi_lengths_NM=batch.multi_lengths_NM[:, :num_multi].contiguous(),
        event_positions=torch.stack(
            [positions_V[torch.from_numpy(e)] for e in events_of_columns], dim=1
        ),
    )


def _join(features: Features, chosen: list[tuple[Block, Int64]], memory: ArrayPool) -> TaskBatch:
    parts = [part for block, episodes_E in chosen for part in _split_into_parts(block, episodes_E)]
    part_starts = np.stack([part.starts_B for part in parts])
    part_lengths = np.stack([part.lengths_B for part in parts])
    # Table by table, and within a table part by part: where each part's ids of each table begin.
    new_starts = offsets(part_lengths.T.ravel())[:-1].reshape(part_lengths.T.shape).T
    columns = {name: _gather(parts, name, memory) for name in _OF_ROWS}
    columns["unique_ids_U"] = _concatenate_ids(parts, part_starts, part_lengths, memory)
    columns["positions_NF"], columns["multi_positions_V"] = _renumber(
        features, parts, (new_starts - part_starts).astype(np.int32), memory
    )
    columns["unique_lengths_B"] = part_lengths.sum(axis=0)
    of_tasks = "task_T", "support_lengths_T", "num_events_T"
    for name in of_tasks if features.events else of_tasks[:2]:
        columns[name] = np.concatenate([getattr(block, name)[own_E] for block, own_E in chosen])
    ends = [block.row_offsets_T1[own_E + 1] for block, own_E in chosen]
    begins = [block.row_offsets_T1[own_E] for block, own_E in chosen]
    columns["row_offsets_T1"] = offsets(np.concatenate(ends) - np.concatenate(begins))
    if features.events:
        columns["event_numbers"] = np.concatenate(
            [
                block.event_numbers[_index_ranges(offsets(block.num_events_T), own_E)[0]]
                for block, own_E in chosen
            ]
        )
    return TaskBatch(**{name: torch.from_numpy(column) for name, column in columns.items()})


def _split_into_parts(block: Block, episodes_E: Int64) -> Iterator[_Part]:
    """Yield the chosen episodes of a block in parts, one for each complete bundle."""
    ids_U, bounds_B1 = block.unique_ids_U, block.unique_offsets_B1
    if len(episodes_E) == block.num_episodes:
        yield _Part(*_place(block, episodes_E), ids_U, bounds_B1[:-1], np.diff(bounds_B1))
        return
    begin = 0  # of the episodes that belong to no whole bundle
    if block.bundles is not None:
        bundle_starts, bundle_lengths = block.bundles.bundle_starts, block.bundles.bundle_lengths
        whole = _find_whole_bundles(block.bundles, block.num_episodes, episodes_E)
        for index, first, stop in whole:
            if begin < first:
                yield _mark_positions(block, episodes_E[begin:first])
            place = _place(block, episodes_E[first:stop])
            yield _Part(*place, ids_U, bundle_starts[index], bundle_lengths[index])
            begin = stop
    if begin < len(episodes_E):
        yield _mark_positions(block, episodes_E[begin:])


def _find_whole_bundles(
    bundles: Bundles, num_episodes: int, episodes_E: Int64
) -> Iterator[tuple[int, int, int]]:
    """Yield each bundle whose episodes are all chosen, with its range among the chosen."""
    bundle_E = episodes_E // bundles.num_tasks
    cuts = np.flatnonzero(bundle_E[1:] != bundle_E[:-1]) + 1
    for first, stop in itertools.pairwise([0, *cuts.tolist(), len(episodes_E)]):
        index = int(bundle_E[first])
        if stop - first == min(bundles.num_tasks, num_episodes - index * bundles.num_tasks):
            yield index, first, stop


def _place(block: Block, episodes_E: Int64) -> tuple[Block, Int64 | slice, Int64 | slice, int, int]:
    rows, num_rows = _index_ranges(block.row_offsets_T1, episodes_E)
    values, num_values = _index_ranges(block.value_offsets_T1, episodes_E)
    return block, rows, values, num_rows, num_values


def _index_ranges(offsets_T1: Int64, episodes_E: Int64) -> tuple[Int64 | slice, int]:
    """Return the index of the rows (or values) of ascending episodes, and their number."""
    # Adjacent episodes give a slice, hence a view, which is not copied.
    first, last = int(episodes_E[0]), int(episodes_E[-1])
    if last - first + 1 == len(episodes_E):
        begin, end = int(offsets_T1[first]), int(offsets_T1[last + 1])
        return slice(begin, end), end - begin
    found = index_entries(offsets_T1, episodes_E)
    return found, len(found)


def _mark_positions(block: Block, episodes_E: Int64) -> _Part:
    """Return chosen episodes, whose ids are found by marking the positions of their rows."""
    place = _place(block, episodes_E)
    _, rows, values, _, _ = place
    # numpy indexes three times as fast by 64-bit integers as by those that it must widen.
    single = block.positions_NF[rows].ravel().astype(np.int64)
    multi = block.multi_positions_V[values].astype(np.int64)
    used = find_distinct(len(block.unique_ids_U), single, multi)
    bounds_B1 = np.searchsorted(used, block.unique_offsets_B1)
    ids, marked = block.unique_ids_U[used], _MarkedPositions(used, single, multi)
    return _Part(*place, ids, bounds_B1[:-1], np.diff(bounds_B1), marked)


def _gather(parts: list[_Part], name: str, memory: ArrayPool) -> npt.NDArray[Any]:
    """Return the rows of all parts of a column, in order; none for a column that is not stored."""
    columns = [getattr(part.block, name) for part in parts]
    num_rows, kind, shape = sum(part.num_rows for part in parts), columns[0].dtype, columns[0].shape
    if not any(map(len, columns)):
        return np.empty((0, *shape[1:]), dtype=kind)
    found = memory.allocate(name, (num_rows, *shape[1:]), kind)
    begin = 0
    for part, own_N in zip(parts, columns, strict=True):
        into = found[begin : begin + part.num_rows]
        if isinstance(part.rows, slice):
            into[:] = own_N[part.rows]
        else:
            # No index is out of range; "clip" lets numpy write to `out` without a buffer between.
            np.take(own_N, part.rows, axis=0, out=into, mode="clip")
        begin += part.num_rows
    return found


def _concatenate_ids(
    parts: list[_Part], part_starts: Int64, part_lengths: Int64, memory: ArrayPool
) -> Int64:
    """Return the ids of all parts [U], table by table, and within a table part by part."""
    # Ids of two parts are not merged, which would need a sort of all: no episode spans two parts,
    # so TaskBatch's promise holds.
    found = memory.allocate("unique_ids_U", (int(part_lengths.sum()),), np.int64)
    ids = [part.ids_U for part in parts]
    part_stops = part_starts + part_lengths
    pieces = [
        own_U[start:stop]
        for starts, stops in zip(part_starts.T.tolist(), part_stops.T.tolist(), strict=True)
        for own_U, start, stop in zip(ids, starts, stops, strict=True)
    ]
    return np.concatenate(pieces, out=found) if pieces else found


def _renumber(
    features: Features, parts: list[_Part], shifts: Int32, memory: ArrayPool
) -> tuple[Int32, Int32]:
    """Return the positions [N, F] and [V] in the batch, where each part's ids moved by `shifts`."""
    num_rows = sum(part.num_rows for part in parts)
    into_NF = memory.allocate("positions_NF", (num_rows, len(features.single)), np.int32)
    num_values = sum(part.num_values for part in parts)
    into_V = memory.allocate("multi_positions_V", (num_values,), np.int32)
    of_lists = sorted(set(features.table_of_lists.tolist()))
    shifts_of_single = shifts[:, features.table_of_single]
    shift_of_many = np.tile(shifts_of_single, _ROWS_AT_ONCE)
    row = value = 0
    for index, part in enumerate(parts):
        block = part.block
        own_NF = into_NF[row : (row := row + part.num_rows)]
        own_V = into_V[value : (value := value + part.num_values)]
        if part.marked is None:
            # All ids of a column's table move by one distance, so nothing is looked up.
            own_NF[:] = block.positions_NF[part.rows]
            # numpy has an overhead for each row: many are added to as one, which saves a tenth of
            # an epoch of bundles.
            whole = len(own_NF) // _ROWS_AT_ONCE
            many = own_NF[: whole * _ROWS_AT_ONCE].reshape(whole, shift_of_many.shape[1])
            many += shift_of_many[index]
            own_NF[whole * _ROWS_AT_ONCE :] += shifts_of_single[index]
            if part.num_values:
                _shift_values(block, part.values, of_lists, shifts[index], own_V)
            continue
        used, single, multi = part.marked
        new = np.arange(len(used), dtype=np.int32) + np.repeat(shifts[index], part.lengths_B)
        new_U = borrow_scratch(len(block.unique_ids_U))
        new_U[used] = new
        np.take(new_U, single, out=own_NF.reshape(-1), mode="clip")
        np.take(new_U, multi, out=own_V, mode="clip")
    return into_NF, into_V


def _shift_values(
    block: Block, values: Int64 | slice, tables: list[int], shift_B: Int32, into_V: Int32
) -> None:
    """Write positions of multi-id features, moved by the shift of their table (of `tables`)."""
    into_V[:] = block.multi_positions_V[values]
    # Ids are stored table by table, so an old position tells its table: read before any moves.
    later = [into_V >= np.int32(block.unique_offsets_B1[table]) for table in tables[1:]]
    into_V += shift_B[tables[0]]
    for is_later_V, before, table in zip(later, tables, tables[1:], strict=False):
        into_V += is_later_V * (shift_B[table] - shift_B[before])
