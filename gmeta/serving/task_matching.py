"""Many tasks at once: rows of both sides in any order, matched by task, in even batches.

Shape suffixes: T tasks, N rows, S support rows, E chosen episodes"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from gmeta.errors import UserError
from gmeta.serving.encoded_rows import EncodedColumns, labels_shape
from gmeta.serving.episodes import task_batch
from metaio.format.features import Features
from metaio.ragged import Int64, offsets, ragged_indices
from metaio.read.batch import TaskBatch

Predict = Callable[[TaskBatch], tuple[Tensor, Tensor]]

# Rows of a batch, counting the padding of tasks shorter than the longest. 3,200 tasks of 30 rows on
# one core take 0.49 s with 8,192, 0.62 s with 2,048 or 65,536, 1.6 s with 1,024.
_BATCH_ROWS = 8_192
# Longer query sets are cut, and adapt once a piece: that is less than their own cost.
_PIECE_ROWS = 4_096


@dataclass(frozen=True)
class TaskPredictions:
    """One entry a query row, in their order: probabilities or ratings, [N, labels] of several."""

    before_N: Tensor
    after_N: Tensor
    support_rows_N: Tensor  # rows that the row's task adapted by


@dataclass(frozen=True)
class _MatchedRows:
    """The order that sorts each side by task; where a task begins there, and its rows."""

    support_order_S: Int64
    support_first_T: Int64
    support_rows_T: Int64
    query_order_N: Int64
    query_first_T: Int64
    query_rows_T: Int64


def predict_tasks(
    predict: Predict,
    features: Features,
    support: EncodedColumns,
    query: EncodedColumns,
    allow_no_support: bool,
) -> TaskPredictions:
    """Return predictions of all query rows, before and after adaptation; `predict` does a batch."""
    sides = _match_tasks(support, query)
    without = int((sides.support_rows_T == 0).sum())
    if without and not allow_no_support:
        # Tasks are sorted by hash here; the message names the first in the caller's order.
        first_rows_T = sides.query_order_N[sides.query_first_T]
        row = int(first_rows_T[sides.support_rows_T == 0].min())
        refuse_without_support(without, len(sides.query_rows_T), row)
    shape = labels_shape(features, query.num_rows)
    before_N, after_N = torch.zeros(shape), torch.zeros(shape)
    for support_E, support_T, query_E, query_T in _cut_batches(sides):
        batch = task_batch(features, support, query, (support_E, query_E), (support_T, query_T))
        before, after = predict(batch)
        place = torch.from_numpy(query_E)
        # Pieces come by size; the caller's order is that of the query rows.
        before_N[place], after_N[place] = before, after
    support_rows_N = np.empty(query.num_rows, np.int64)
    # From the order by task back to the caller's.
    support_rows_N[sides.query_order_N] = np.repeat(sides.support_rows_T, sides.query_rows_T)
    return TaskPredictions(before_N, after_N, torch.from_numpy(support_rows_N))


def refuse_without_support(without: int, num_tasks: int, row: int) -> NoReturn:
    """Raise UserError for query tasks without support rows, the first of them in `row`."""
    raise UserError(
        f"{without:,} of the {num_tasks:,} query tasks have 0 support rows, the first of them in "
        f"query row {row}: they cannot adapt. Add their support rows, or allow them to be "
        "predicted without adaptation (--allow-no-support)"
    )


def _match_tasks(support: EncodedColumns, query: EncodedColumns) -> _MatchedRows:
    # Stable: rows of a task stay in the order of the file.
    order_N, order_S = (np.argsort(rows.task_N, kind="stable") for rows in (query, support))
    tasks_T, query_first_T, query_rows_T = np.unique(
        query.task_N[order_N], return_index=True, return_counts=True
    )
    sorted_S = support.task_N[order_S]
    first_T = np.searchsorted(sorted_S, tasks_T, side="left")
    stop_T = np.searchsorted(sorted_S, tasks_T, side="right")
    return _MatchedRows(order_S, first_T, stop_T - first_T, order_N, query_first_T, query_rows_T)


def _cut_batches(sides: _MatchedRows) -> Iterator[tuple[Int64, Int64, Int64, Int64]]:
    """Yield for each batch: support rows, each task's number of them, and the same of query."""
    pieces_T = -(-sides.query_rows_T // _PIECE_ROWS)
    task_E = np.repeat(np.arange(len(pieces_T)), pieces_T)
    # Query rows of earlier pieces of the same task.
    skipped_E = (np.arange(len(task_E)) - np.repeat(offsets(pieces_T)[:-1], pieces_T)) * _PIECE_ROWS
    query_E = np.minimum(sides.query_rows_T[task_E] - skipped_E, _PIECE_ROWS)
    support_E = sides.support_rows_T[task_E]
    # Pieces of like size share a batch: little of it is then padding.
    by_size = np.lexsort((query_E, support_E))
    longest_E = support_E + query_E
    for chosen in cut_runs(by_size, longest_E):
        task, support_T, query_T = task_E[chosen], support_E[chosen], query_E[chosen]
        support = ragged_indices(sides.support_first_T[task], support_T)
        query = ragged_indices(sides.query_first_T[task] + skipped_E[chosen], query_T)
        yield sides.support_order_S[support], support_T, sides.query_order_N[query], query_T


def cut_runs(order: Int64, rows_E: Int64) -> Iterator[Int64]:
    """Yield runs of `order` whose number times their largest `rows_E` stays within a batch."""
    # Number times largest: every task of a batch is padded to its longest.
    first, longest = 0, 0
    for index, piece in enumerate(order):
        longest = max(longest, int(rows_E[piece]))
        if index > first and (index - first + 1) * longest > _BATCH_ROWS:
            yield order[first:index]
            first, longest = index, int(rows_E[piece])
    if first < len(order):
        yield order[first:]
