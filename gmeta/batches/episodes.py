"""From a TaskBatch to what a meta-step needs: ids to fetch, each task's own rows, support and query
sides.

All of it is integer bookkeeping, done on the host before anything goes to a device.

Shape suffixes: T episodes, N rows, B tables, U fetched rows, P distinct (task, row) pairs, R rows
of one side with its padding, F single-id features, M multi-id features, V ids of all bags.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gmeta.adaptation.bags import Bags
from gmeta.adaptation.blocks import (
    GROUP_WEIGHTS,
    BlockGroup,
    BlockHistory,
    BlockRows,
    BlockSide,
    Rectangle,
    StackedBlocks,
    TaskBlocks,
    group_tasks,
)
from gmeta.adaptation.layout import RowLayout
from gmeta.adaptation.side import Side, Sides, TaskGroups
from metaio.batch import TaskBatch
from metaio.task_rows import task_rows
from models.config import Pooling

Ints = npt.NDArray[np.int64]
# Fewer may be equal by chance.
MANY_TASKS = 8

ArrangedRows = Side | Sides | TaskGroups | TaskBlocks | StackedBlocks


class RowFetch(ABC):
    """The rows of a step on their way from the ranks that hold them. All ranks make the same calls
    in the same order.
    """

    # The place in `unique_ids_U` of each row's id; None: rows come in the order of ids.
    id_of_row_U: Tensor | None = None

    @abstractmethod
    def send(self) -> None:
        """Let the ids travel."""

    @abstractmethod
    def look_up(self) -> None:
        """Let the rows travel as they are now: no table may change before `rows_UD`."""

    @abstractmethod
    def rows_UD(self, gradient_unit: float) -> Tensor:
        """The rows, differentiable; `gradient_unit` is about the size of their gradients, the same
        on every rank.
        """


@dataclass(frozen=True)
class Episodes:
    """A rank's share of a step.

    Its rows are one side for plain training, where every row is a query row; both sides to predict;
    for the general inner loop both sides of groups of tasks; for the fused one both as blocks.
    """

    task_T: Tensor  # which task each episode is of; stays on the host
    unique_ids_U: Tensor
    unique_lengths_B: Tensor
    # The fetched row behind each row that the sides index, and the gather of these; None when they
    # index the fetched rows themselves.
    fetched_row_P: Tensor | None
    copies: Bags | None
    rows: ArrangedRows
    num_terms: int  # of the outer loss: tasks with query rows; rows if plain
    num_rows: int
    fetch: RowFetch | None = None  # None: no rank was told yet which rows are needed
    # Whether the next batch probably makes tensors of the same sizes again.
    sizes_recur: bool = False

    def fetched_by(self, fetch: RowFetch) -> "Episodes":
        """These episodes with their rows on the way."""
        return replace(self, fetch=fetch)

    def to(self, device: torch.device) -> "Episodes":
        """Copy to a device."""
        return replace(
            self,
            unique_ids_U=self.unique_ids_U.to(device, non_blocking=True),
            unique_lengths_B=self.unique_lengths_B.to(device, non_blocking=True),
            fetched_row_P=None
            if self.fetched_row_P is None
            else self.fetched_row_P.to(device, non_blocking=True),
            copies=None if self.copies is None else self.copies.to(device),
            rows=self.rows.to(device),
        )

    @property
    def id_of_copy_P(self) -> Tensor | None:
        """The place in `unique_ids_U` of the id behind each row that the sides index; None when
        they index the fetched rows themselves.
        """
        id_of_row_U = None if self.fetch is None else self.fetch.id_of_row_U
        if self.fetched_row_P is None or id_of_row_U is None:
            return self.fetched_row_P
        return id_of_row_U.index_select(0, self.fetched_row_P)

    def working_rows_PD(self, rows_UD: Tensor) -> Tensor:
        """The rows that the sides index: each task's own copy where embeddings adapt."""
        return rows_UD if self.copies is None else self.copies.pool(rows_UD)


def ids_of_query_rows(batch: TaskBatch) -> Tensor:
    """Which of the batch's unique ids a query row uses: bool [U]."""
    lengths = np.stack(_side_lengths(batch), axis=1).ravel()  # support, query, support, ...
    is_query_N = np.repeat(np.arange(lengths.size) % 2 == 1, lengths)
    query_N = torch.from_numpy(np.flatnonzero(is_query_N))
    is_used_U = torch.zeros(batch.unique_ids_U.numel(), dtype=torch.bool)
    used = [batch.positions_NF.index_select(0, query_N).flatten()]
    if batch.multi_positions_V.numel():
        values_N = batch.multi_lengths_NM.sum(dim=1).numpy()
        used.append(batch.multi_positions_V[torch.from_numpy(np.repeat(is_query_N, values_N))])
    for positions in used:
        is_used_U.index_fill_(0, positions.to(torch.int64), True)
    return is_used_U


def has_equal_tasks(batch: TaskBatch) -> bool:
    """Whether all of many tasks have as many support rows, and as many query rows: probably those
    of the next batch have them, too.
    """
    support_T, query_T = _side_lengths(batch)
    many = len(support_T) >= MANY_TASKS
    return many and bool((support_T == support_T[0]).all() and (query_T == query_T[0]).all())


def plain_rows(batch: TaskBatch) -> Episodes:
    """Every row of the batch on its own, whatever its task and side."""
    return _episodes(batch, None, every_row(batch), batch.num_rows)


def every_row(batch: TaskBatch, constant: bool = False) -> Side:
    """All rows of the batch as one side, which reads from the fetched rows; of constant ones
    nobody can ask for the gradient.
    """
    every_row_N = torch.ones(batch.num_rows, dtype=torch.bool)
    lengths_T = batch.row_offsets_T1.diff()
    return _side(batch, every_row_N, lengths_T, batch.unique_ids_U.numel(), constant)


def support_and_query(batch: TaskBatch, rows_per_task: bool, to_predict: bool = False) -> Episodes:
    """Both sides of every task; with `rows_per_task` each task gets its own copy of the rows it
    uses. `to_predict`: nobody can ask for a gradient but that of the copies that adapt.
    """
    batch, fetched_row_P, num_rows = _reading_copies(batch, rows_per_task)
    constant_sides = to_predict and not rows_per_task, to_predict
    (sides,) = _sides(batch, [np.arange(batch.num_tasks)], num_rows, constant_sides)
    return _episodes(batch, fetched_row_P, sides, _num_with_query(batch), to_predict)


def task_groups(batch: TaskBatch, rows_per_task: bool, num_weights: int) -> Episodes:
    """The same in groups of tasks of similar size where that saves more work than it makes, with so
    many weights in the layers that adapt.
    """
    groups = group_tasks(*_side_lengths(batch), least_gain=GROUP_WEIGHTS / max(num_weights, 1))
    batch, fetched_row_P, num_rows = _reading_copies(batch, rows_per_task)
    rows = TaskGroups(_sides(batch, groups, num_rows))
    return _episodes(batch, fetched_row_P, rows, _num_with_query(batch))


def block_groups(batch: TaskBatch) -> list[BlockGroup]:
    """Groups of the tasks with query rows; no loss depends on how the others adapt."""
    support_T, query_T = _side_lengths(batch)
    with_query = np.flatnonzero(query_T)
    found = group_tasks(support_T[with_query], query_T[with_query])
    groups = [with_query[group] for group in found]
    return [
        BlockGroup(tasks, int(support_T[tasks].max()), int(query_T[tasks].max()))
        for tasks in groups
    ]


def task_blocks(
    batch: TaskBatch,
    groups: Sequence[BlockGroup],
    rows_per_task: bool,
    stacked: bool,
    pooling: Pooling,
    history: int | None,
    constant_support: bool = False,
) -> Episodes:
    """Both sides of these groups as blocks, for a model that sees pooled features, and the multi-id
    feature `history` unpooled; `stacked` for one operation on both sides at a time. With
    `constant_support` nobody can ask for the gradient of what the support rows use.
    """
    batch, fetched_row_P, num_rows = _reading_copies(batch, rows_per_task)
    starts_T, ends_T = batch.row_offsets_T1[:-1].numpy(), batch.row_offsets_T1[1:].numpy()
    middles_T = starts_T + batch.support_lengths_T.numpy()
    tasks = [group.tasks for group in groups]

    def block_of(*bounds: tuple[Ints, Ints], constant: bool = False) -> BlockSide:
        return _block_side(batch, bounds, tasks, pooling, history, num_rows, constant)

    support, query = (starts_T, middles_T), (middles_T, ends_T)
    num_terms = sum(len(group.tasks) for group in groups)
    rows = (
        StackedBlocks.of(block_of(support, query))
        if stacked
        else TaskBlocks(block_of(support, constant=constant_support), block_of(query))
    )
    return _episodes(batch, fetched_row_P, rows, num_terms)


def _episodes(
    batch: TaskBatch,
    fetched_row_P: Tensor | None,
    rows: ArrangedRows,
    num_terms: int,
    constant: bool = False,
) -> Episodes:
    copies = None
    if fetched_row_P is not None:
        copies = Bags.single(fetched_row_P, batch.unique_ids_U.numel(), constant)
    return Episodes(
        task_T=batch.task_T,
        unique_ids_U=batch.unique_ids_U,
        unique_lengths_B=batch.unique_lengths_B,
        fetched_row_P=fetched_row_P,
        copies=copies,
        rows=rows,
        num_terms=num_terms,
        num_rows=batch.num_rows,
    )


def _reading_copies(batch: TaskBatch, rows_per_task: bool) -> tuple[TaskBatch, Tensor | None, int]:
    """The batch with its positions into the tasks' own rows if they have such, the fetched row
    behind each of these, and how many rows are read from.
    """
    if not rows_per_task:
        return batch, None, batch.unique_ids_U.numel()
    rows = task_rows(batch)
    batch = replace(batch, positions_NF=rows.positions_NF, multi_positions_V=rows.multi_positions_V)
    return batch, rows.level1_position_P, rows.level1_position_P.numel()


def _side_lengths(batch: TaskBatch) -> tuple[Ints, Ints]:
    """Support and query rows of each task."""
    support_T = batch.support_lengths_T.numpy().astype(np.int64)
    return support_T, batch.row_offsets_T1.diff().numpy() - support_T


def _num_with_query(batch: TaskBatch) -> int:
    """Tasks with query rows."""
    return int(np.count_nonzero(_side_lengths(batch)[1]))


def _sides(
    batch: TaskBatch,
    groups: Sequence[Ints],
    num_rows: int,
    constant_sides: tuple[bool, bool] = (False, False),
) -> tuple[Sides, ...]:
    """Both sides of each group's tasks, in the order of the batch; each may be constant."""
    support_T, rows_T = batch.support_lengths_T, batch.row_offsets_T1.diff()
    task_N = torch.repeat_interleave(torch.arange(batch.num_tasks), rows_T)
    within_N = torch.arange(batch.num_rows) - batch.row_offsets_T1[task_N]
    is_support_N = within_N < support_T[task_N]
    found = []
    for tasks in groups:
        chosen_T = torch.zeros(batch.num_tasks, dtype=torch.bool)
        chosen_T[tasks] = True
        chosen_N = chosen_T[task_N]
        rows_of_sides = (
            (chosen_N & is_support_N, support_T[chosen_T]),
            (chosen_N & ~is_support_N, (rows_T - support_T)[chosen_T]),
        )
        sides = (
            _side(batch, *rows, num_rows, constant)
            for rows, constant in zip(rows_of_sides, constant_sides, strict=True)
        )
        found.append(Sides(*sides))
    return tuple(found)


def _side(
    batch: TaskBatch, mask_N: Tensor, lengths_T: Tensor, num_rows: int, constant: bool = False
) -> Side:
    index = mask_N.nonzero().squeeze(1)
    bag_sizes = batch.multi_lengths_NM.index_select(0, index).reshape(-1).to(torch.int64)
    values_N = batch.multi_lengths_NM.sum(dim=1)
    bag_positions_V = batch.multi_positions_V[torch.repeat_interleave(mask_N, values_N)]
    single_positions_V = batch.positions_NF.index_select(0, index).flatten()
    return Side(
        layout=RowLayout.of(lengths_T),
        label_N=batch.label_N.index_select(0, index),
        dense_NK=batch.dense_NK.index_select(0, index),
        num_single=batch.positions_NF.shape[1],
        single_rows=Bags.single(single_positions_V, num_rows, constant),
        bag_rows=Bags.single(bag_positions_V, num_rows, constant),
        bag_index_V=torch.repeat_interleave(torch.arange(bag_sizes.numel()), bag_sizes),
        num_multi=batch.multi_lengths_NM.shape[1],
    )


def _block_side(
    batch: TaskBatch,
    bounds: Sequence[tuple[Ints, Ints]],
    groups: list[Ints],
    pooling: Pooling,
    history: int | None,
    num_rows: int,
    constant: bool,
) -> BlockSide:
    """Rows start to end of each task, for each of these bounds, group by group; row -1 stands for
    one that pads.
    """
    rectangles, row_R, count_R, task_R, first = [], [], [], [], 0
    place_T = np.empty(batch.num_tasks, np.int64)
    place_T[np.concatenate(groups)] = np.arange(sum(map(len, groups)))
    for (start_T, end_T), tasks in product(bounds, groups):
        lengths = (end_T - start_T)[tasks]
        longest = int(lengths.max())
        within = np.arange(longest)
        there = within < lengths[:, None]
        row_R.append(np.where(there, start_T[tasks, None] + within, -1).ravel())
        count_R.append(np.where(there, lengths[:, None], np.inf).ravel())
        task_R.append(np.repeat(place_T[tasks], longest))
        rectangles.append(Rectangle(first, len(tasks), longest))
        first += len(tasks) * longest
    rows_R = np.concatenate(row_R)
    index_R = torch.from_numpy(np.maximum(rows_R, 0))
    there_R1 = torch.from_numpy(rows_R >= 0).unsqueeze(1)
    return BlockSide(
        rows=BlockRows(
            rectangles=tuple(rectangles),
            label_N=batch.label_N.index_select(0, index_R),
            count_N=torch.from_numpy(np.concatenate(count_R)),
            task_N=torch.from_numpy(np.concatenate(task_R)),
        ),
        bags=_pooled(batch, rows_R, pooling, history, num_rows, constant),
        num_features=batch.positions_NF.shape[1] + batch.multi_lengths_NM.shape[1],
        history=None if history is None else _history(batch, rows_R, history, num_rows, constant),
        dense_NK=batch.dense_NK.index_select(0, index_R) * there_R1,
    )


def _pooled(
    batch: TaskBatch,
    rows_R: Ints,
    pooling: Pooling,
    history: int | None,
    num_rows: int,
    constant: bool,
) -> Bags:
    """Bags of each row's features, single then multi-id; empty ones for a row of -1 and for the
    history.
    """
    num_single, num_multi = batch.positions_NF.shape[1], batch.multi_lengths_NM.shape[1]
    there_R = rows_R >= 0
    rows_N = rows_R[there_R]
    pooled_M = np.flatnonzero(np.arange(num_multi) != (-1 if history is None else history))
    values_V, lengths_NM = _values(batch, rows_N, pooled_M)
    lengths_RC = np.zeros((len(rows_R), num_single + num_multi), np.int64)
    lengths_RC[there_R, :num_single] = 1
    lengths_RC[np.ix_(there_R, num_single + pooled_M)] = lengths_NM
    lengths = torch.from_numpy(lengths_RC.ravel())
    single = batch.positions_NF.numpy()[rows_N].ravel()
    if not num_multi:
        return Bags.of(torch.from_numpy(single), lengths, None, num_rows, constant)
    # Entries in the order of rows: each row's single ids, then its multi-id values.
    entries = np.empty(int(lengths_RC.sum()), single.dtype)
    is_single = np.repeat(
        np.tile([True, False], len(rows_N)),
        np.stack([np.full(len(rows_N), num_single), lengths_NM.sum(axis=1)], axis=1).ravel(),
    )
    entries[is_single] = single
    entries[~is_single] = values_V
    weight_V = None
    if pooling == "mean":
        weight_V = torch.repeat_interleave(lengths.to(torch.float64).reciprocal(), lengths)
    return Bags.of(torch.from_numpy(entries), lengths, weight_V, num_rows, constant)


def _history(
    batch: TaskBatch, rows_R: Ints, feature: int, num_rows: int, constant: bool
) -> BlockHistory:
    """The values of one multi-id feature, one by one; none for a row of -1."""
    there_R = rows_R >= 0
    values_V, lengths_N1 = _values(batch, rows_R[there_R], np.array([feature]))
    lengths_R = np.zeros(len(rows_R), np.int64)
    lengths_R[there_R] = lengths_N1[:, 0]
    there_RH = torch.from_numpy(np.arange(lengths_R.max(initial=0)) < lengths_R[:, None])
    lengths = there_RH.flatten().to(torch.int64)
    bags = Bags.of(torch.from_numpy(values_V), lengths, None, num_rows, constant)
    return BlockHistory(bags, there_RH)


def _values(batch: TaskBatch, rows_N: Ints, features_M: Ints) -> tuple[Ints, Ints]:
    """The positions that these multi-id features of these rows hold, row by row, feature by feature
    in a row, and how many each has: [V], [N, M].
    """
    lengths_NM = batch.multi_lengths_NM.numpy().astype(np.int64)
    starts_NM = np.cumsum(lengths_NM).reshape(lengths_NM.shape) - lengths_NM
    chosen = np.ix_(rows_N, features_M)
    taken_NM = lengths_NM[chosen]
    taken = taken_NM.ravel()
    shift = starts_NM[chosen].ravel() - (np.cumsum(taken) - taken)
    index_V = np.repeat(shift, taken) + np.arange(taken.sum())
    return batch.multi_positions_V.numpy()[index_V], taken_NM
