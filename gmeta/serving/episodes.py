"""A batch of episodes made of encoded rows.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, E chosen episodes, P task-row pairs"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gmeta.serving.encoded_rows import EncodedColumns, join_rows, take_rows
from metaio.format.block import Rows, build_block
from metaio.format.features import Features, name_event_column
from metaio.prepare.episodes.events import TaskEvents, TimedRows
from metaio.ragged import Int64, find_firsts, offsets, owners, ragged_indices, reorder_row_by_row
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose


def task_batch(
    features: Features,
    support: EncodedColumns,
    query: EncodedColumns,
    chosen_E: tuple[Int64, Int64],
    lengths_T: tuple[Int64, Int64],
) -> TaskBatch:
    """Return a batch of the rows `chosen_E` (indices of each side), `lengths_T` of them a task;
    those that are events alone are known to the others, and not among them."""
    support_E, query_E = chosen_E
    support_T, query_T = lengths_T
    # A block holds each task's support rows and then its query rows; here each side is one array.
    sides = [support_E, query_E + support.num_rows]
    order_N = reorder_row_by_row(np.stack(lengths_T, axis=1), sides)
    both = join_rows([side for side in (support, query) if side.num_rows] or [query])
    # One task's query rows, as most requests have them, stand as they should.
    if not np.array_equal(order_N, np.arange(both.num_rows)):
        both = take_rows(both, order_N)
    events, event_task = None, owners(support_T + query_T)
    if (is_alone_N := both.is_alone_N).any():
        events, event_task = take_rows(both, np.flatnonzero(is_alone_N)), event_task[is_alone_N]
        both = take_rows(both, np.flatnonzero(~is_alone_N))
        support_T = support_T - np.bincount(event_task, minlength=len(support_T))
    rows = Rows(
        # Numbered within the batch, which may hold several pieces of one long task.
        task_T=np.arange(len(support_T)),
        row_lengths_T=support_T + query_T,
        support_lengths_T=support_T,
        label_N=both.label_N,
        dense_NK=both.dense_NK,
        ids_NF=both.ids_NF,
        multi_ids_V=both.values_V,
        multi_lengths_NM=both.lengths_NM,
        weight_N=both.weight_NW.ravel(),
    )
    if features.events:
        rows = _with_events(features, rows, both.event_times, events, event_task)
    return compose(features, [(build_block(features, rows), np.arange(len(support_T)))])


def _with_events(
    features: Features,
    rows: Rows,
    event_times: npt.NDArray[np.float64],
    alone: EncodedColumns | None,
    task_of_alone: Int64,
) -> Rows:
    """Return the rows with their tasks' events: support rows, of which a query row knows all, and
    those that are events alone."""
    is_support_N = find_firsts(rows.row_lengths_T, rows.support_lengths_T)
    singles = [name_event_column(feature.name) for feature in features.single]
    columns = [singles.index(feature.name) for feature in features.events]
    numbers = [features.dense.index(name) for name in features.event_dense]
    parts = [
        TimedRows(
            task_N=owners(rows.row_lengths_T),
            time_N=np.where(is_support_N, event_times[:, 0], np.inf),
            tie_N=np.zeros(len(event_times)),
            is_event_N=is_support_N & (event_times[:, 1] > 0),
            seconds_N=event_times[:, 0],
            ids_NM=rows.ids_NF[:, columns],
            dense_NK=rows.dense_NK[:, numbers],
        )
    ]
    if alone is not None:
        time_N, is_event_N = alone.event_times[:, 0], np.ones(alone.num_rows, np.bool_)
        ids_NM, dense_NK = alone.ids_NF[:, columns], alone.dense_NK[:, numbers]
        tie_N = np.zeros(len(time_N))
        own = TimedRows(task_of_alone, time_N, tie_N, is_event_N, time_N, ids_NM, dense_NK)
        parts.append(own)
    timed = TimedRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    # Those of one moment as they come.
    timed = timed._replace(tie_N=np.arange(len(timed.tie_N)))
    events = TaskEvents(timed, features.event_delay, features.event_longest)
    # An episode of no row holds no event, and has no first row for their ids.
    has_rows_T = rows.row_lengths_T > 0
    lengths_T = rows.row_lengths_T[has_rows_T]
    known = events.gather(np.arange(len(event_times)), lengths_T)
    starts_NM = offsets(rows.multi_lengths_NM.ravel())[:-1].reshape(rows.multi_lengths_NM.shape)
    found, starts_NM = events.add_lists(
        replace(rows, row_lengths_T=lengths_T), starts_NM, len(rows.multi_ids_V), known
    )
    num_events_T = np.zeros(len(has_rows_T), np.int64)
    num_events_T[has_rows_T] = known.num_events_T
    values_V = np.concatenate([rows.multi_ids_V, *events.ids_of_columns])
    index_V = ragged_indices(starts_NM.ravel(), found.multi_lengths_NM.ravel().astype(np.int64))
    return replace(
        found,
        row_lengths_T=rows.row_lengths_T,
        num_events_T=num_events_T,
        multi_ids_V=values_V[index_V],
    )


def find_tasks_P(batch: TaskBatch, num_rows: int) -> Tensor:
    """Return the task [P] of each row in the batch that is a task's own copy."""
    if batch.num_tasks == 1:
        return torch.zeros(num_rows, dtype=torch.int64)
    task_N = torch.arange(batch.num_tasks).repeat_interleave(batch.row_offsets_T1.diff())
    task_P = torch.empty(num_rows, dtype=torch.int64)
    task_P[batch.positions_NF] = task_N.unsqueeze(1).expand_as(batch.positions_NF)
    values_N = batch.multi_lengths_NM.sum(dim=1)
    task_P[batch.multi_positions_V] = task_N.repeat_interleave(values_N)
    return task_P
