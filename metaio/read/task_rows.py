"""Second deduplication: the rows that adapt. A row used by two episodes adapts twice, so it needs
two copies.

Shape suffixes: T episodes, N rows, F single-id features, V ids of all multi-id features, U unique
ids of the batch, P distinct (episode, position) pairs.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metaio.ragged import row_sums
from metaio.read.batch import TaskBatch

# A mark per (episode, id) costs a byte to clear and to scan, a sort about 60 ns a position.
_MARK_RATIO = 32


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
    # A pair is one number: episode * U + position.
    num_unique = max(batch.unique_ids_U.numel(), 1)
    row_lengths_T = np.diff(batch.row_offsets_T1.numpy())
    episode_N = np.repeat(np.arange(batch.num_tasks), row_lengths_T)
    values_N = row_sums(batch.multi_lengths_NM.numpy())
    single_NF = batch.positions_NF.numpy() + (episode_N * num_unique)[:, None]
    multi_V = batch.multi_positions_V.numpy() + np.repeat(episode_N * num_unique, values_N)
    pairs_P, single, multi = _number(single_NF.ravel(), multi_V, batch.num_tasks * num_unique)
    return TaskRows(
        torch.from_numpy(pairs_P % num_unique),
        torch.from_numpy(single.reshape(single_NF.shape)),
        torch.from_numpy(multi),
    )


def _number(
    single: npt.NDArray[np.int64], multi: npt.NDArray[np.int64], num_keys: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the distinct keys of both arrays, ascending, and each array's keys as ranks."""
    if num_keys > _MARK_RATIO * (len(single) + len(multi)):
        keys, rank = np.unique(np.concatenate([single, multi]), return_inverse=True)
        return keys, rank[: len(single)], rank[len(single) :]
    mark = np.zeros(num_keys, dtype=np.bool_)
    mark[single] = True
    mark[multi] = True
    keys = np.flatnonzero(mark)
    rank_of = np.empty(num_keys, dtype=np.int64)
    rank_of[keys] = np.arange(len(keys))
    return keys, rank_of[single], rank_of[multi]
