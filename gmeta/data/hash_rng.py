"""Random numbers by hashing, each a pure function of a key and a name; and rows in such an order.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from metaio.hashing import UInt64, splitmix64, unit_interval
from metaio.ragged import Int64, offsets, owners, places, ragged_indices, sum_rows
from metaio.read.batch import TaskBatch

# What keeps the random streams of different purposes apart.
SHARE_STREAM, ROW_STREAM, ID_STREAM, ITEM_STREAM = 1, 2, 3, 4


def mix_key(*parts: int) -> int:
    """Return one number of 64 bits, mixed from several."""
    number = np.zeros(1, dtype=np.uint64)
    for part in parts:
        number = splitmix64(number + np.uint64(part % 2**64))
    return int(number[0])


def draw_uniform(names: UInt64, key: int, stream: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each name: its hash under the key."""
    return unit_interval(splitmix64(names ^ splitmix64(np.uint64(mix_key(key, stream)))))


def draw_for_rows(task_T: Int64, row_offsets_T1: Int64, key: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each row [N], by `key`, its task and its place there."""
    rows_T = np.diff(row_offsets_T1)
    within_N = places(rows_T)
    # Tasks are mixed before row numbers are added: row 1 of task 7 must not draw as row 0 of 8.
    names_N = np.repeat(splitmix64(task_T.astype(np.uint64)), rows_T) + within_N.astype(np.uint64)
    return draw_uniform(names_N, key, ROW_STREAM)


def reorder_rows(batch: TaskBatch, order_N: Int64, support_T: Int64) -> TaskBatch:
    """Return the batch with the rows `order_N`, in this order; the first `support_T` of each
    episode are its support."""
    # The order keeps every episode's rows together; it may leave some out.
    rows_T = np.diff(batch.row_offsets_T1.numpy())
    kept_T = np.bincount(owners(rows_T)[order_N], minlength=len(rows_T))
    values_N = sum_rows(batch.multi_lengths_NM.numpy())
    order_V = ragged_indices(offsets(values_N)[order_N], values_N[order_N])
    rows = torch.from_numpy(order_N)
    return replace(
        batch,
        row_offsets_T1=torch.from_numpy(offsets(kept_T)),
        support_lengths_T=torch.from_numpy(support_T),
        label_N=batch.label_N[rows],
        dense_NK=batch.dense_NK[rows],
        positions_NF=batch.positions_NF[rows],
        multi_positions_V=batch.multi_positions_V[torch.from_numpy(order_V)],
        multi_lengths_NM=batch.multi_lengths_NM[rows],
        row_id_N=batch.row_id_N[rows] if batch.row_id_N.numel() else batch.row_id_N,
        weight_N=batch.weight_N[rows] if batch.weight_N.numel() else batch.weight_N,
        events_before_N=batch.events_before_N[rows]
        if batch.events_before_N.numel()
        else batch.events_before_N,
    )
