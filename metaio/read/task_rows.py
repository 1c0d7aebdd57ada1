"""Second deduplication: the rows that adapt. A row used by two episodes adapts twice, so it needs
two copies.

Shape suffixes: T episodes, N rows, F single-id features, V ids of all multi-id features, U unique
ids of the batch, P distinct (episode, position) pairs.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metaio.ragged import Int64, row_sums
from metaio.read.batch import TaskBatch

_MAX_BITS = 63


class TaskRows(NamedTuple):
    """Rows of each episode's own working copy, episode by episode, ascending by position within
    one.
    """

    level1_position_P: Tensor  # int64, into TaskBatch.unique_ids_U
    positions_NF: Tensor  # int64, into the P pairs
    multi_positions_V: Tensor  # int64, into the P pairs


def task_rows(batch: TaskBatch) -> TaskRows:
    """Return positions into one row per (episode, unique id): `rows_UD[level1_position_P]` are the
    copies to adapt.

    For every entry, level1_position_P[positions_NF] equals batch.positions_NF, and two entries
    share a pair exactly if they share episode and position.

    >>> from metaio.read.batch import empty_batch
    >>> task_rows(empty_batch(1, 1, 0, 0)).level1_position_P.tolist()
    []
    """
    # A pair is one number: the episode's bits, then those of the position.
    position_bits = (batch.unique_ids_U.numel() - 1).bit_length()
    episode_bits = batch.num_tasks.bit_length()
    row_lengths_T = np.diff(batch.row_offsets_T1.numpy())
    episode_N = np.repeat(np.arange(batch.num_tasks) << position_bits, row_lengths_T)
    values_N = row_sums(batch.multi_lengths_NM.numpy())
    positions_NF, multi_V = batch.positions_NF.numpy(), batch.multi_positions_V.numpy()
    num_single = positions_NF.size
    keys = np.empty(num_single + len(multi_V), dtype=np.int64)
    np.add(positions_NF, episode_N[:, None], out=keys[:num_single].reshape(positions_NF.shape))
    np.add(multi_V, np.repeat(episode_N, values_N), out=keys[num_single:])
    pairs_P, ranks = _number(keys, episode_bits + position_bits)
    return TaskRows(
        torch.from_numpy(pairs_P & ((1 << position_bits) - 1)),
        torch.from_numpy(ranks[:num_single].reshape(positions_NF.shape)),
        torch.from_numpy(ranks[num_single:]),
    )


def _number(keys: Int64, key_bits: int) -> tuple[Int64, Int64]:
    """Return the distinct keys, ascending, and each key's rank among them; keys have so many
    bits.
    """
    index_bits = len(keys).bit_length()
    if key_bits + index_bits > _MAX_BITS:
        return np.unique(keys, return_inverse=True)
    # Each key carries its index in its low bits: a sort is several times as fast as an argsort.
    placed = keys << index_bits
    placed |= np.arange(len(keys))
    placed.sort()
    place_of = placed & ((1 << index_bits) - 1)
    placed >>= index_bits
    is_new = np.zeros(len(keys), dtype=np.bool_)
    np.not_equal(placed[1:], placed[:-1], out=is_new[1:])
    ranks = np.empty(len(keys), dtype=np.int64)
    ranks[place_of] = np.cumsum(is_new, dtype=np.int32)
    is_new[:1] = True  # counted by none before it
    return placed[is_new], ranks
