"""Makes a TaskBatch of chosen episodes of decoded blocks: positions are counted, nothing is hashed.

Shape suffixes: T episodes, N rows, F single-id features, M multi-id features, K dense columns, V
ids of all multi-id features, B tables, U unique ids of all tables; E episodes chosen from one
block, P positions used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metaio.batch import TaskBatch, empty_batch
from metaio.block import Block, Int64, offsets, ragged_indices
from metaio.features import Features

Scalar = TypeVar("Scalar", bound=np.generic)

# Marking costs about 1 ns an id of the block, sorting about 6 ns a position of the batch.
_MARK_RATIO = 6


@dataclass(frozen=True)
class _Part:
    """The chosen episodes of one block, ids still at the block's positions."""

    block: Block
    episodes_E: Int64
    rows: Int64 | slice
    positions_NF: Int64  # int64: as an index it is twice as fast as int32
    multi_positions_V: Int64
    used_P: Int64  # block positions that occur, ascending
    used_lengths_B: Int64


def compose(features: Features, parts: Sequence[tuple[Block, Int64]]) -> TaskBatch:
    """The batch of the episodes [E] of each block, in the order given.

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
        )
        return empty_batch(*sizes)
    if len(chosen) == 1 and len(chosen[0][1]) == chosen[0][0].num_episodes:
        return _whole_block(chosen[0][0])
    return _join([_part(block, episodes_E) for block, episodes_E in chosen])


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
    )


def _ranges(offsets_T1: Int64, episodes_E: Int64) -> Int64 | slice:
    """Index of the rows (or values) of ascending episodes; a slice, hence a view, where they are
    adjacent.
    """
    if episodes_E[-1] - episodes_E[0] + 1 == len(episodes_E):
        return slice(int(offsets_T1[episodes_E[0]]), int(offsets_T1[episodes_E[-1] + 1]))
    starts_E = offsets_T1[episodes_E]
    return ragged_indices(starts_E, offsets_T1[episodes_E + 1] - starts_E)


def _part(block: Block, episodes_E: Int64) -> _Part:
    rows = _ranges(block.row_offsets_T1, episodes_E)
    values = _ranges(block.value_offsets_T1, episodes_E)
    positions = _take(block.positions_NF, rows).astype(np.int64)
    multi = _take(block.multi_positions_V, values).astype(np.int64)
    used_P = _distinct(positions.ravel(), multi, len(block.unique_ids_U))
    used_lengths_B = np.diff(np.searchsorted(used_P, block.unique_offsets_B1))
    return _Part(block, episodes_E, rows, positions, multi, used_P, used_lengths_B)


def _distinct(positions: Int64, multi: Int64, num_unique: int) -> Int64:
    """The distinct values of both arrays, ascending; all are below `num_unique`."""
    if num_unique > _MARK_RATIO * (len(positions) + len(multi)):
        return np.unique(np.concatenate([positions, multi]))
    mark_U = np.zeros(num_unique, dtype=np.bool_)
    mark_U[positions] = True
    mark_U[multi] = True
    return np.flatnonzero(mark_U)


def _take(array: npt.NDArray[Scalar], index: Int64 | slice) -> npt.NDArray[Scalar]:
    return array[index] if isinstance(index, slice) else np.take(array, index, axis=0)


def _join(parts: list[_Part]) -> TaskBatch:
    # An id may stand once for each block that it comes from: no episode spans two blocks, so the
    # promise of TaskBatch holds, and merging them would need a sort.
    lengths_PB = np.stack([part.used_lengths_B for part in parts])
    # Table by table, and within a table part by part: where each part's ids of each table begin.
    starts_PB = offsets(lengths_PB.T.ravel())[:-1].reshape(lengths_PB.T.shape).T
    unique_ids_U = np.empty(int(lengths_PB.sum()), dtype=np.int64)
    positions, multi = [], []
    for part, lengths_B, starts_B in zip(parts, lengths_PB, starts_PB, strict=True):
        ids_P = part.block.unique_ids_U[part.used_P]
        bounds = offsets(lengths_B)
        for table, start in enumerate(starts_B.tolist()):
            own = ids_P[bounds[table] : bounds[table + 1]]
            unique_ids_U[start : start + len(own)] = own
        renumber_U = np.empty(len(part.block.unique_ids_U), dtype=np.int32)
        shift_B = (starts_B - bounds[:-1]).astype(np.int32)
        new_P = np.arange(len(ids_P), dtype=np.int32) + np.repeat(shift_B, lengths_B)
        renumber_U[part.used_P] = new_P
        # Positions are within bounds; mode="clip" only spares numpy a second pass over them.
        positions.append(np.take(renumber_U, part.positions_NF, mode="clip"))
        multi.append(np.take(renumber_U, part.multi_positions_V, mode="clip"))
    row_lengths_T = np.concatenate([np.diff(p.block.row_offsets_T1)[p.episodes_E] for p in parts])
    return TaskBatch(
        task_T=torch.from_numpy(np.concatenate([p.block.task_T[p.episodes_E] for p in parts])),
        row_offsets_T1=torch.from_numpy(offsets(row_lengths_T)),
        support_lengths_T=torch.from_numpy(
            np.concatenate([p.block.support_lengths_T[p.episodes_E] for p in parts])
        ),
        label_N=_gather([(p.block.label_N, p.rows) for p in parts]),
        dense_NK=_gather([(p.block.dense_NK, p.rows) for p in parts]),
        unique_ids_U=torch.from_numpy(unique_ids_U),
        unique_lengths_B=torch.from_numpy(lengths_PB.sum(axis=0)),
        positions_NF=torch.from_numpy(np.concatenate(positions)),
        multi_positions_V=torch.from_numpy(np.concatenate(multi)),
        multi_lengths_NM=_gather([(p.block.multi_lengths_NM, p.rows) for p in parts]),
    )


def _gather(parts: list[tuple[npt.NDArray[np.generic], Int64 | slice]]) -> Tensor:
    return torch.from_numpy(np.concatenate([_take(array, index) for array, index in parts]))
