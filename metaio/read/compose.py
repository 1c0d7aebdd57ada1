"""Makes a TaskBatch of chosen episodes of decoded blocks: positions are counted, nothing is hashed.

Shape suffixes: T episodes, N rows, F single-id features, M multi-id features, K dense columns, V
ids of all multi-id features, B tables, U unique ids of all tables; E episodes chosen from one
block, P positions used.
"""

import itertools
from collections.abc import Sequence
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
    """The chosen episodes of one block, and where their rows and ids go in the batch."""

    block: Block
    episodes_E: Int64
    rows: Int64 | slice
    values: Int64 | slice
    num_rows: int
    num_values: int

    @property
    def is_whole(self) -> bool:
        """Tell whether all episodes of the block are chosen."""
        return len(self.episodes_E) == self.block.num_episodes


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
    return _join(features, [_part(block, episodes_E) for block, episodes_E in chosen])


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


def _part(block: Block, episodes_E: Int64) -> _Part:
    row_bounds, value_bounds = block.row_offsets_T1, block.value_offsets_T1
    return _Part(
        block,
        episodes_E,
        _ranges(row_bounds, episodes_E),
        _ranges(value_bounds, episodes_E),
        int((row_bounds[episodes_E + 1] - row_bounds[episodes_E]).sum()),
        int((value_bounds[episodes_E + 1] - value_bounds[episodes_E]).sum()),
    )


def _join(features: Features, parts: list[_Part]) -> TaskBatch:
    # An id may stand once for each block that it comes from: no episode spans two blocks, so the
    # promise of TaskBatch holds, and merging them would need a sort of all ids.
    rows = [part.rows for part in parts]
    row_counts = [part.num_rows for part in parts]
    value_counts = [part.num_values for part in parts]
    positions_NF = _gather([part.block.positions_NF for part in parts], rows, row_counts)
    multi_V = _gather(
        [part.block.multi_positions_V for part in parts],
        [part.values for part in parts],
        value_counts,
    )
    unique_ids_U, unique_lengths_B = _renumber(
        features,
        parts,
        np.split(positions_NF, np.cumsum(row_counts)[:-1]),
        np.split(multi_V, np.cumsum(value_counts)[:-1]),
    )
    row_lengths_T = np.concatenate([np.diff(p.block.row_offsets_T1)[p.episodes_E] for p in parts])
    support_T = np.concatenate([p.block.support_lengths_T[p.episodes_E] for p in parts])
    return TaskBatch(
        task_T=torch.from_numpy(np.concatenate([p.block.task_T[p.episodes_E] for p in parts])),
        row_offsets_T1=torch.from_numpy(offsets(row_lengths_T)),
        support_lengths_T=torch.from_numpy(support_T),
        label_N=torch.from_numpy(_gather([p.block.label_N for p in parts], rows, row_counts)),
        dense_NK=torch.from_numpy(_gather([p.block.dense_NK for p in parts], rows, row_counts)),
        unique_ids_U=torch.from_numpy(unique_ids_U),
        unique_lengths_B=torch.from_numpy(unique_lengths_B),
        positions_NF=torch.from_numpy(positions_NF),
        multi_positions_V=torch.from_numpy(multi_V),
        multi_lengths_NM=torch.from_numpy(
            _gather([p.block.multi_lengths_NM for p in parts], rows, row_counts)
        ),
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


def _renumber(
    features: Features, parts: list[_Part], positions: list[Int32], multi: list[Int32]
) -> tuple[Int64, Int64]:
    """Change positions within blocks into positions within the batch, in place.

    Returns the ids [U] that are used, table by table, and how many each table has.
    """
    # numpy indexes with 64 bits, three times as fast as where it has to widen the index itself.
    wide = [
        [old.astype(np.int64) for old in ((of_multi,) if part.is_whole else (of_single, of_multi))]
        for part, of_single, of_multi in zip(parts, positions, multi, strict=True)
    ]
    found = [_used(part, olds) for part, olds in zip(parts, wide, strict=True)]
    lengths_PB = np.stack([np.diff(bounds_B1) for _, _, bounds_B1 in found])
    # Table by table, and within a table part by part: where each part's ids of each table begin.
    starts_PB = offsets(lengths_PB.T.ravel())[:-1].reshape(lengths_PB.T.shape).T
    names = [table.name for table in features.tables]
    table_F = [names.index(feature.table) for feature in features.single]
    # In place: the positions were gathered for this batch and belong to nobody else.
    for index, (part, (used_P, _, bounds_B1)) in enumerate(zip(parts, found, strict=True)):
        shift_B = (starts_PB[index] - bounds_B1[:-1]).astype(np.int32)
        new_P = np.arange(bounds_B1[-1], dtype=np.int32) + np.repeat(shift_B, lengths_PB[index])
        news = [positions[index], multi[index]]
        if used_P is None:
            # All ids of a column's table move by as much: nothing is looked up.
            new_U, news = new_P, news[1:]
            positions[index] += shift_B[table_F]
        else:
            new_U = scratch(len(part.block.unique_ids_U))
            new_U[used_P] = new_P
        for old, new in zip(wide[index], news, strict=True):
            np.take(new_U, old, out=new, mode="clip")
    pieces = [
        ids_P[first:stop]
        for bounds in zip(*(itertools.pairwise(own.tolist()) for _, _, own in found), strict=True)
        for (_, ids_P, _), (first, stop) in zip(found, bounds, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *pieces]), lengths_PB.sum(axis=0)


def _used(part: _Part, positions: list[Int64]) -> tuple[Int64 | None, Int64, Int64]:
    """Return the positions [P] of the block that its chosen episodes use, their ids, and each
    table's bounds.

    Of a whole block all are used: then the first is None.
    """
    block = part.block
    if part.is_whole:
        return None, block.unique_ids_U, block.unique_offsets_B1
    used_P = distinct_below(len(block.unique_ids_U), *positions)
    return used_P, block.unique_ids_U[used_P], np.searchsorted(used_P, block.unique_offsets_B1)
