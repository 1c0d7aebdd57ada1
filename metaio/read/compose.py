"""Makes a TaskBatch of chosen episodes of decoded blocks: positions are counted, nothing is hashed.

Shape suffixes: T episodes, N rows, F single-id features, M multi-id features, K dense columns, V
ids of all multi-id features, B tables, U unique ids of all tables; E episodes chosen from one
block, P parts of a batch, or positions that one of them uses.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metaio.format.block import Block, distinct_below, scratch
from metaio.format.features import Features
from metaio.ragged import Int32, Int64, offsets, ragged_indices
from metaio.read.batch import TaskBatch, empty_batch

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class _Part:
    """Chosen episodes of one block, and where their rows, values and ids stand in it."""

    block: Block
    episodes_E: Int64
    rows: Int64 | slice
    values: Int64 | slice
    num_rows: int
    num_values: int
    # Of a whole block or bundle: where its ids of each table begin, and how many there are. Of
    # other episodes only their positions tell.
    ids: tuple[Int64, Int64] | None


@dataclass(frozen=True)
class _Ids:
    """Ids that a part uses: of each table one stretch of `ids_U`, and what its positions become."""

    ids_U: Int64
    starts_B: Int64
    lengths_B: Int64
    # Of a part without `ids`: positions of the block that are used, those of its rows and values.
    used_P: Int64
    single: Int64
    multi: Int64


def compose(features: Features, parts: Sequence[tuple[Block, Int64]]) -> TaskBatch:
    """Return the batch of the episodes [E] of each block, in the order given.

    Episodes of one block must be given once, ascending. A batch that is exactly one block shares
    its memory.
    """
    chosen = [(block, episodes_E) for block, episodes_E in parts if len(episodes_E)]
    if not chosen:
        sizes = (
            len(features.tables),
            len(features.single),
            len(features.multi),
            len(features.dense),
            features.num_labels,
        )
        return empty_batch(*sizes)
    # What BlockOrder asks for all the time, at the cost of ten views.
    if len(chosen) == 1 and len(chosen[0][1]) == chosen[0][0].num_episodes:
        return _whole_block(chosen[0][0])
    return _join(features, [part for block, own_E in chosen for part in _parts(block, own_E)])


def _tensor(array: npt.NDArray[np.generic]) -> Tensor:
    # DLPack shares read-only Arrow memory without the warning that torch.from_numpy gives.
    return (
        torch.from_numpy(array) if array.flags.writeable else torch.utils.dlpack.from_dlpack(array)
    )


def _whole_block(block: Block) -> TaskBatch:
    return TaskBatch(
        task_T=_tensor(block.task_T),
        row_offsets_T1=_tensor(block.row_offsets_T1),
        support_lengths_T=_tensor(block.support_lengths_T),
        label_N=_tensor(block.label_N),
        dense_NK=_tensor(block.dense_NK),
        unique_ids_U=_tensor(block.unique_ids_U),
        unique_lengths_B=_tensor(np.diff(block.unique_offsets_B1)),
        positions_NF=_tensor(block.positions_NF),
        multi_positions_V=_tensor(block.multi_positions_V),
        multi_lengths_NM=_tensor(block.multi_lengths_NM),
        row_id_N=_tensor(block.row_id_N),
        weight_N=_tensor(block.weight_N),
    )


def _ranges(offsets_T1: Int64, episodes_E: Int64) -> Int64 | slice:
    """Return the index of the rows (or values) of ascending episodes; a slice, hence a view, where
    they are adjacent.
    """
    if episodes_E[-1] - episodes_E[0] + 1 == len(episodes_E):
        return slice(int(offsets_T1[episodes_E[0]]), int(offsets_T1[episodes_E[-1] + 1]))
    starts_E = offsets_T1[episodes_E]
    return ragged_indices(starts_E, offsets_T1[episodes_E + 1] - starts_E)


def _parts(block: Block, episodes_E: Int64) -> Iterator[_Part]:
    """Yield the chosen episodes of a block, whole bundles by themselves."""
    if len(episodes_E) == block.num_episodes:
        starts_B = block.unique_offsets_B1[:-1]
        yield _part(block, episodes_E, (starts_B, np.diff(block.unique_offsets_B1)))
        return
    if block.bundles is None:
        yield _part(block, episodes_E, None)
        return
    num_tasks = block.bundles.num_tasks
    bundle_E = episodes_E // num_tasks
    cuts = np.flatnonzero(np.diff(bundle_E, prepend=-1, append=-1)).tolist()
    begin = 0  # of episodes whose bundles are cut
    for first, stop in itertools.pairwise(cuts):
        index = int(bundle_E[first])
        if stop - first == min(num_tasks, block.num_episodes - index * num_tasks):
            if begin < first:
                yield _part(block, episodes_E[begin:first], None)
            ids = block.bundles.starts_GB[index], block.bundles.lengths_GB[index]
            yield _part(block, episodes_E[first:stop], ids)
            begin = stop
    if begin < len(episodes_E):
        yield _part(block, episodes_E[begin:], None)


def _part(block: Block, episodes_E: Int64, ids: tuple[Int64, Int64] | None) -> _Part:
    row_bounds, value_bounds = block.row_offsets_T1, block.value_offsets_T1
    return _Part(
        block,
        episodes_E,
        _ranges(row_bounds, episodes_E),
        _ranges(value_bounds, episodes_E),
        int((row_bounds[episodes_E + 1] - row_bounds[episodes_E]).sum()),
        int((value_bounds[episodes_E + 1] - value_bounds[episodes_E]).sum()),
        ids,
    )


def _join(features: Features, parts: list[_Part]) -> TaskBatch:
    rows = [part.rows for part in parts]
    row_counts = [part.num_rows for part in parts]
    lengths_NM = _gather([part.block.multi_lengths_NM for part in parts], rows, row_counts)
    found = [_ids(part) for part in parts]
    lengths_PB = np.stack([own.lengths_B for own in found])
    # Table by table, and within a table part by part: where each part's ids of each table begin.
    starts_PB = offsets(lengths_PB.T.ravel())[:-1].reshape(lengths_PB.T.shape).T
    positions_NF, multi_V = _renumber(features, parts, found, starts_PB, lengths_NM)
    row_lengths_T = np.concatenate([np.diff(p.block.row_offsets_T1)[p.episodes_E] for p in parts])
    support_T = np.concatenate([p.block.support_lengths_T[p.episodes_E] for p in parts])
    return TaskBatch(
        task_T=torch.from_numpy(np.concatenate([p.block.task_T[p.episodes_E] for p in parts])),
        row_offsets_T1=torch.from_numpy(offsets(row_lengths_T)),
        support_lengths_T=torch.from_numpy(support_T),
        label_N=torch.from_numpy(_gather([p.block.label_N for p in parts], rows, row_counts)),
        dense_NK=torch.from_numpy(_gather([p.block.dense_NK for p in parts], rows, row_counts)),
        unique_ids_U=torch.from_numpy(_unique(found)),
        unique_lengths_B=torch.from_numpy(lengths_PB.sum(axis=0)),
        positions_NF=torch.from_numpy(positions_NF),
        multi_positions_V=torch.from_numpy(multi_V),
        multi_lengths_NM=torch.from_numpy(lengths_NM),
        row_id_N=torch.from_numpy(_stored([p.block.row_id_N for p in parts], rows, row_counts)),
        weight_N=torch.from_numpy(_stored([p.block.weight_N for p in parts], rows, row_counts)),
    )


def _stored(
    arrays: list[npt.NDArray[Scalar]], rows: list[Int64 | slice], counts: list[int]
) -> npt.NDArray[Scalar]:
    """Return what the rows have of a column that not every dataset stores; nothing of none."""
    return _gather(arrays, rows, counts) if any(map(len, arrays)) else arrays[0]


def _gather(
    arrays: list[npt.NDArray[Scalar]], indices: list[Int64 | slice], counts: list[int]
) -> npt.NDArray[Scalar]:
    """Return the chosen entries of each array, one after another."""
    found = np.empty((sum(counts), *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    begin = 0
    for array, index, count in zip(arrays, indices, counts, strict=True):
        into = found[begin : begin + count]
        if isinstance(index, slice):
            into[:] = array[index]
        else:
            # Indices are within bounds; mode="clip" lets numpy write without a buffer between.
            np.take(array, index, axis=0, out=into, mode="clip")
        begin += count
    return found


def _ids(part: _Part) -> _Ids:
    """Return the ids that a part uses; of other than whole blocks and bundles they are marked."""
    none, block = np.zeros(0, dtype=np.int64), part.block
    if part.ids is not None:
        return _Ids(block.unique_ids_U, *part.ids, none, none, none)
    # numpy indexes with 64 bits, three times as fast as where it has to widen the index itself.
    single = block.positions_NF[part.rows].ravel().astype(np.int64)
    multi = block.multi_positions_V[part.values].astype(np.int64)
    used_P = distinct_below(len(block.unique_ids_U), single, multi)
    bounds_B1 = np.searchsorted(used_P, block.unique_offsets_B1)
    ids_P = block.unique_ids_U[used_P]
    return _Ids(ids_P, bounds_B1[:-1], np.diff(bounds_B1), used_P, single, multi)


def _unique(found: list[_Ids]) -> Int64:
    """Return the ids of all parts [U], table by table, and within a table part by part.

    An id may stand once for each part that it comes from: no episode spans two, so the promise of
    TaskBatch holds, and merging them would need a sort of all ids.
    """
    starts_BP = np.stack([own.starts_B for own in found], axis=1)
    stops_BP = starts_BP + np.stack([own.lengths_B for own in found], axis=1)
    pieces = [np.zeros(0, dtype=np.int64)]
    for starts, stops in zip(starts_BP.tolist(), stops_BP.tolist(), strict=True):
        pieces += [
            own.ids_U[start:stop] for own, start, stop in zip(found, starts, stops, strict=True)
        ]
    return np.concatenate(pieces)


def _renumber(
    features: Features,
    parts: list[_Part],
    found: list[_Ids],
    starts_PB: Int64,
    lengths_NM: Int32,
) -> tuple[Int32, Int32]:
    """Return the positions [N, F] and [V] of all parts in the batch, where each part's ids of each
    table begin at `starts_PB`.
    """
    names = [table.name for table in features.tables]
    table_F, table_M = (
        [names.index(feature.table) for feature in kind]
        for kind in (features.single, features.multi)
    )
    positions_NF = np.empty((len(lengths_NM), len(table_F)), dtype=np.int32)
    multi_V = np.empty(sum(part.num_values for part in parts), dtype=np.int32)
    first_row = first_value = 0
    for part, own, starts_B in zip(parts, found, starts_PB, strict=True):
        rows = slice(first_row, first_row := first_row + part.num_rows)
        values = slice(first_value, first_value := first_value + part.num_values)
        shift_B = (starts_B - own.starts_B).astype(np.int32)
        if part.ids is not None:
            # All ids of a column's table move by as much: nothing is looked up.
            shift_V = _of_values(shift_B[table_M], lengths_NM[rows])
            np.add(part.block.positions_NF[part.rows], shift_B[table_F], out=positions_NF[rows])
            np.add(part.block.multi_positions_V[part.values], shift_V, out=multi_V[values])
        else:
            new_U = scratch(len(part.block.unique_ids_U))
            new_U[own.used_P] = np.arange(len(own.used_P), dtype=np.int32) + np.repeat(
                shift_B, own.lengths_B
            )
            np.take(new_U, own.single, out=positions_NF[rows].reshape(-1), mode="clip")
            np.take(new_U, own.multi, out=multi_V[values], mode="clip")
    return positions_NF, multi_V


def _of_values(shift_M: Int32, lengths_NM: Int32) -> Int32:
    """Return each feature's shift for each of its values, row by row; one number where all share
    one.
    """
    if len(shift_M) and (shift_M == shift_M[0]).all():
        return shift_M[:1]
    return np.repeat(np.tile(shift_M, len(lengths_NM)), lengths_NM.ravel())
