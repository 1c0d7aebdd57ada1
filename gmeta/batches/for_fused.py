"""A TaskBatch for the fused inner loop: both sides of its tasks in rectangles of padded rows, and
the bags of ids behind each row.

Shape suffixes: T episodes, N rows, R rows of one side with its padding, F single-id features, M
multi-id features, C features of both kinds, H history values of a row, V ids of all bags.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gmeta.adaptation.objectives import label_weights
from gmeta.adaptation.rows.common import CommonFeatures
from gmeta.adaptation.rows.rectangles import (
    RECTANGLE_WORK,
    FusedLayout,
    PaddedFeatures,
    PaddedHistory,
    PaddedRows,
    PaddedTasks,
    Rectangle,
    TaskGroup,
    group_tasks,
    least_gain,
)
from gmeta.adaptation.rows.sparse_matrix import Bags
from gmeta.batches.episodes import Episodes, Ints, reading_copies, side_lengths
from gmeta_models.config import Pooling
from metaio.read.batch import TaskBatch

# Multiply-adds of a product of rows below which to take what tasks share apart, once a task, costs
# more in calls than it saves. At 5 million it costs as much on one thread, and 6 % of a step more
# on two, which share the products but not the calls. On CUDA about 15 launches, estimated.
LEAST_COMMON_WORK = {"cpu": 8_000_000, "cuda": 2_000_000_000}


def similar_tasks(batch: TaskBatch, layout: FusedLayout) -> list[TaskGroup]:
    """Group the tasks with query rows by size; no loss depends on how the others adapt."""
    support_T, query_T = side_lengths(batch)
    with_query = np.flatnonzero(query_T)
    gain = least_gain(RECTANGLE_WORK, layout.device, layout.num_weights)
    groups = [
        with_query[group] for group in group_tasks(support_T[with_query], query_T[with_query], gain)
    ]
    return [
        TaskGroup(tasks, int(support_T[tasks].max()), int(query_T[tasks].max())) for tasks in groups
    ]


def padded_tasks(batch: TaskBatch, groups: Sequence[TaskGroup], layout: FusedLayout) -> Episodes:
    """Return both sides of these groups of tasks, as the fused loop takes them.

    Features that all rows of a task share stand apart where that pays.
    """
    batch, fetched_row_P, num_rows = reading_copies(batch, layout.rows_per_task)
    whole, common_F = batch, _common_features(batch, layout)
    if common_F is not None:
        batch = replace(batch, positions_NF=batch.positions_NF[:, ~common_F])
    starts_T, ends_T = batch.row_offsets_T1[:-1].numpy(), batch.row_offsets_T1[1:].numpy()
    middles_T = starts_T + batch.support_lengths_T.numpy()
    tasks = [group.tasks for group in groups]
    support, support_R = _padded_rows(batch, starts_T, middles_T, tasks)
    query, query_R = _padded_rows(batch, middles_T, ends_T, tasks)
    features: tuple[PaddedFeatures, ...]
    if layout.stacked:
        both_R = np.concatenate([support_R, query_R])
        features = (_padded_features(batch, both_R, layout, num_rows),)
    else:
        features = (
            _padded_features(batch, support_R, layout, num_rows, layout.constant_support),
            _padded_features(batch, query_R, layout, num_rows),
        )
    common = None
    if common_F is not None:
        common = _common_block(whole, common_F, np.concatenate(tasks), num_rows)
    rows = PaddedTasks(support, query, features, common)
    return Episodes.of(batch, fetched_row_P, rows, sum(map(len, tasks)))


def _common_features(batch: TaskBatch, layout: FusedLayout) -> torch.Tensor | None:
    """Return which single-id features are the same on all rows of every task, if that saves enough
    of the first layer's products: bool [F].
    """
    weights, least_work = layout.first_layer_weights, LEAST_COMMON_WORK[layout.device]
    num_features = batch.positions_NF.shape[1] + batch.multi_lengths_NM.shape[1]
    if batch.num_rows * weights < least_work:
        return None
    positions_NF, starts_T = batch.positions_NF.numpy(), batch.row_offsets_T1[:-1].numpy()
    as_before_NF = positions_NF[1:] == positions_NF[:-1]
    as_before_NF[starts_T[(starts_T > 0) & (starts_T < batch.num_rows)] - 1] = True
    common_F = as_before_NF.all(axis=0)
    if common_F.all() and num_features == common_F.size and not batch.dense_NK.shape[1]:
        common_F[-1:] = False  # rows of nothing are not worth the care
    saved = batch.num_rows * weights * np.count_nonzero(common_F) / num_features
    return torch.from_numpy(common_F) if saved >= least_work else None


def _common_block(
    batch: TaskBatch, common_F: torch.Tensor, tasks: Ints, num_rows: int
) -> CommonFeatures:
    """Return these features of these tasks, group by group."""
    first_rows = batch.row_offsets_T1[torch.from_numpy(tasks)]
    positions = batch.positions_NF[first_rows][:, common_F]
    return CommonFeatures(
        features=tuple(common_F.nonzero().squeeze(1).tolist()),
        bags=Bags.single(positions.flatten(), num_rows),
    )


def _padded_rows(
    batch: TaskBatch, start_T: Ints, end_T: Ints, groups: list[Ints]
) -> tuple[PaddedRows, Ints]:
    """Return rows start to end of each task, group by group, and which rows of the batch they are:
    [R], -1 for one that pads.
    """
    rectangles, row_R, count_R, first = [], [], [], 0
    for tasks in groups:
        lengths = (end_T - start_T)[tasks]
        longest = int(lengths.max(initial=0))
        within = np.arange(longest)
        there = within < lengths[:, None]
        row_R.append(np.where(there, start_T[tasks, None] + within, -1).ravel())
        count_R.append(np.where(there, lengths[:, None], np.inf).ravel())
        rectangles.append(Rectangle(first, len(tasks), longest))
        first += len(tasks) * longest
    rows_R = np.concatenate(row_R)
    per_task = np.repeat([mine.rows for mine in rectangles], [mine.tasks for mine in rectangles])
    stored_R = torch.from_numpy(np.maximum(rows_R, 0))
    label_N = batch.label_N.index_select(0, stored_R)
    weight_N = batch.weight_N[stored_R] if batch.weight_N.numel() else batch.weight_N
    rows = PaddedRows(
        rectangles=tuple(rectangles),
        label_N=label_N,
        weight=label_weights(label_N, weight_N),
        count_N=torch.from_numpy(np.concatenate(count_R).astype(np.float32)),
        task_N=torch.from_numpy(np.repeat(np.arange(len(per_task)), per_task)),
    )
    return rows, rows_R


def _padded_features(
    batch: TaskBatch, rows_R: Ints, layout: FusedLayout, num_rows: int, constant: bool = False
) -> PaddedFeatures:
    """Return the features of these rows; of `constant` ones nobody asks for the gradient."""
    history = layout.history
    there_R1 = torch.from_numpy(rows_R >= 0).unsqueeze(1)
    dense_NK = batch.dense_NK.index_select(0, torch.from_numpy(np.maximum(rows_R, 0)))
    return PaddedFeatures(
        bags=_pooled(batch, rows_R, layout.pooling, history, num_rows, constant),
        num_features=batch.positions_NF.shape[1] + batch.multi_lengths_NM.shape[1],
        history=None if history is None else _history(batch, rows_R, history, num_rows, constant),
        dense_NK=dense_NK * there_R1,
    )


def _pooled(
    batch: TaskBatch,
    rows_R: Ints,
    pooling: Pooling,
    history: int | None,
    num_rows: int,
    constant: bool,
) -> Bags:
    """Return bags of each row's features, single then multi-id; empty ones for a row of -1 and for
    the history.
    """
    num_single, num_multi = batch.positions_NF.shape[1], batch.multi_lengths_NM.shape[1]
    there_N = np.flatnonzero(rows_R >= 0)
    rows_N = rows_R[there_N]
    pooled_M = np.flatnonzero(np.arange(num_multi) != (-1 if history is None else history))
    values_V, lengths_NM = _values(batch, rows_N, pooled_M)
    lengths_NC = np.zeros((len(rows_N), num_single + num_multi), np.int64)
    lengths_NC[:, :num_single] = 1
    lengths_NC[:, num_single + pooled_M] = lengths_NM
    lengths_RC = np.zeros((len(rows_R), num_single + num_multi), np.int64)
    lengths_RC[there_N] = lengths_NC
    lengths = torch.from_numpy(lengths_RC.ravel())
    single_NF = batch.positions_NF.numpy()[rows_N]
    if not num_multi:
        return Bags.of(torch.from_numpy(single_NF.ravel()), lengths, None, num_rows, constant)
    # Entries in the order of rows: each row's single ids, then its multi-id values.
    values_N = lengths_NM.sum(axis=1)
    row_starts_N = _starts(num_single + values_N)
    place_V = _ranges(row_starts_N + num_single, values_N)
    entries = np.empty(single_NF.size + values_V.size, single_NF.dtype)
    entries[row_starts_N[:, None] + np.arange(num_single)] = single_NF
    entries[place_V] = values_V
    weight_V = None
    if pooling == "mean":
        weights = np.ones(entries.size)
        taken = lengths_NM.ravel()
        weights[place_V] = np.repeat(1.0 / np.maximum(taken, 1), taken)
        weight_V = torch.from_numpy(weights)
    return Bags.of(torch.from_numpy(entries), lengths, weight_V, num_rows, constant)


def _history(
    batch: TaskBatch, rows_R: Ints, feature: int, num_rows: int, constant: bool
) -> PaddedHistory:
    """Return the values of one multi-id feature, one by one; none for a row of -1."""
    there_R = rows_R >= 0
    values_V, lengths_N1 = _values(batch, rows_R[there_R], np.array([feature]))
    lengths_R = np.zeros(len(rows_R), np.int64)
    lengths_R[there_R] = lengths_N1[:, 0]
    there_RH = torch.from_numpy(np.arange(lengths_R.max(initial=0)) < lengths_R[:, None])
    lengths = there_RH.flatten().to(torch.int64)
    bags = Bags.of(torch.from_numpy(values_V), lengths, None, num_rows, constant)
    return PaddedHistory(bags, there_RH)


def _values(batch: TaskBatch, rows_N: Ints, features_M: Ints) -> tuple[Ints, Ints]:
    """Return the positions that these multi-id features of these rows hold, row by row, feature by
    feature in a row, and how many each has: [V], [N, M].
    """
    lengths_NM = batch.multi_lengths_NM.numpy().astype(np.int64)
    starts_NM = _starts(lengths_NM.ravel()).reshape(lengths_NM.shape)
    chosen = np.ix_(rows_N, features_M)
    taken_NM = lengths_NM[chosen]
    index_V = _ranges(starts_NM[chosen].ravel(), taken_NM.ravel())
    return batch.multi_positions_V.numpy()[index_V], taken_NM


def _starts(lengths: Ints) -> Ints:
    """Return where each of these stands when they follow each other."""
    starts: Ints = np.cumsum(lengths) - lengths
    return starts


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, ... of each, one after the other."""
    shifts = np.repeat(starts - _starts(lengths), lengths)
    ranges: Ints = shifts + np.arange(len(shifts))
    return ranges
