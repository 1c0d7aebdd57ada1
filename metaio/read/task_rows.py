"""Second deduplication: the rows that adapt. A row used by two episodes adapts twice, so it needs
two copies.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, U
unique ids, D embedding width, P task-row pairs.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metaio.ragged import sum_rows
from metaio.read.batch import TaskBatch


class TaskRows(NamedTuple):
    """Rows of each episode's own working copy, episode by episode, ascending by position within
    one."""

    level1_position_P: Tensor  # int64, into TaskBatch.unique_ids_U
    positions_NF: Tensor  # int64, into the P pairs
    multi_positions_V: Tensor  # int64, into the P pairs


def deduplicate_task_rows(batch: TaskBatch) -> TaskRows:
    """Return positions into one row per (episode, unique id): `rows_UD[level1_position_P]` are the
    copies to adapt.

    For every entry, level1_position_P[positions_NF] equals batch.positions_NF, and two entries
    share a pair exactly if they share episode and position.

    >>> from metaio.read.batch import empty_batch
    >>> task_rows(empty_batch(1, 1, 0, 0)).level1_position_P.tolist()
    []
    """
    # A pair is one number: the episode, then the position.
    num_positions = max(batch.unique_ids_U.numel(), 1)
    row_lengths_T = np.diff(batch.row_offsets_T1.numpy())
    episode_N = np.repeat(np.arange(batch.num_tasks) * num_positions, row_lengths_T)
    values_N = sum_rows(batch.multi_lengths_NM.numpy())
    positions_NF, multi_V = batch.positions_NF.numpy(), batch.multi_positions_V.numpy()
    num_single = positions_NF.size
    keys_NF, keys_V = positions_NF + episode_N[:, None], multi_V + np.repeat(episode_N, values_N)
    pairs_P, ranks = np.unique(np.concatenate([keys_NF.ravel(), keys_V]), return_inverse=True)
    return TaskRows(
        torch.from_numpy(pairs_P % num_positions),
        torch.from_numpy(ranks[:num_single].reshape(positions_NF.shape)),
        torch.from_numpy(ranks[num_single:]),
    )
