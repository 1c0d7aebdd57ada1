"""From a TaskBatch to what a meta-step needs: ids to fetch, each task's own rows, support and query
sides. All of it is integer bookkeeping on the host.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, B tables, U unique ids, D embedding width, P task-row pairs"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gmeta.adaptation.layout.padded_layout import PaddedTasks
from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.adaptation.layout.sides import Side, Sides, TaskGroups
from gmeta.adaptation.layout.sparse_matrix import Bags
from gmeta.data.task_groups import group_tasks
from gmeta.data.transfer import Packed, pack, send_to_device, unpack
from gmeta.losses.objectives import label_weights
from gmeta_models.sequence.encoder import EventLayout
from metaio.ragged import Int64, ragged_indices
from metaio.read.batch import TaskBatch, deduplicate_task_rows

CollatedRows = Side | Sides | TaskGroups | PaddedTasks


class RowFetch(ABC):
    """A step's rows on their way from the ranks that hold them; all ranks make the same calls."""

    @abstractmethod
    def send(self) -> None:
        """Send the ids."""

    @abstractmethod
    def look_up(self) -> None:
        """Send the rows as they are now: no table may change before `rows_UD`."""

    @abstractmethod
    def rows_UD(self, gradient_unit: float) -> Tensor:
        """Return the rows, differentiable; `gradient_unit` is about the size of their gradients."""


@dataclass(frozen=True)
class RowPlan:
    """The rows to request and to send, as an exchange plans them before a step."""

    known: Any  # on the host
    numbers: Any  # a tree of tensors for the device, or what `packed` made of it


class LearnerInputs(NamedTuple):
    """All that a learner reads of a rank's share of a step, except for the rows that are fetched.

    `rows` is one side for plain training, where every row is a query row; both sides to predict;
    groups of tasks for the general inner loop; padded tasks for the fused one."""

    unique_lengths_B: Tensor
    # The fetched row behind each row that the sides index, and the gather of these; None: the sides
    # index the fetched rows themselves.
    fetched_row_P: Tensor | None
    copies: Bags | None
    rows: CollatedRows
    events: EventLayout | None = None  # None: the learner reads none


@dataclass(frozen=True)
class Episodes:
    """A rank's share of a step."""

    # What the learner reads (`held`) goes to the device; the rest, and the ids, stay on the host.
    task_T: Tensor  # which task each episode is of
    unique_ids_U: Tensor
    unique_lengths_B: Tensor
    rows_of_tables: tuple[int, ...]  # the same
    held: LearnerInputs | Packed[LearnerInputs]
    num_terms: int  # of the outer loss: tasks with query rows; rows if plain
    num_reported: int  # terms with a loss to show; Reptile also learns from others
    num_rows: int
    # How the raw data names each query row, where the dataset tells; to predict alone.
    query_row_id_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    # The row of the item's table in each query row, where the dataset names an item; as above.
    query_item_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    # Which query rows are candidates that were sampled beside the stored ones; as above.
    query_sampled_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    # Items of the events that each query row knows, and how many it knows; as above.
    query_known: tuple[Tensor, Tensor] | None = None
    # How many rows shapes are made for, where sizes are rounded up to few (buckets.py); else 0.
    num_fetched: int = 0
    plan: RowPlan | None = None  # None: no exchange has looked at the ids yet
    fetch: RowFetch | None = None  # None: no rank was told yet which rows are needed

    @classmethod
    def of(
        cls,
        batch: TaskBatch,
        fetched_row_P: Tensor | None,
        rows: CollatedRows,
        num_terms: int,
        constant: bool = False,
        device: str = "cpu",
    ) -> "Episodes":
        """Return the batch's episodes with these collated rows; no gradient of `constant` ones."""
        copies = None
        if fetched_row_P is not None:
            copies = Bags.single(fetched_row_P, batch.unique_ids_U.numel(), constant, device)
        return cls(
            task_T=batch.task_T,
            unique_ids_U=batch.unique_ids_U,
            unique_lengths_B=batch.unique_lengths_B,
            rows_of_tables=tuple(batch.unique_lengths_B.tolist()),
            held=LearnerInputs(batch.unique_lengths_B, fetched_row_P, copies, rows),
            num_terms=num_terms,
            num_reported=num_terms,
            num_rows=batch.num_rows,
        )

    @cached_property
    def inputs(self) -> LearnerInputs:
        """Return what the learner reads, as tensors of their own."""
        return unpack(self.held)

    @property
    def rows(self) -> CollatedRows:
        """Return the collated rows."""
        return self.inputs.rows

    @property
    def copies(self) -> Bags | None:
        """Return the gather of each task's own copies, see LearnerInputs."""
        return self.inputs.copies

    def with_plan(self, plan: RowPlan) -> "Episodes":
        """Return these episodes with this plan."""
        return replace(self, plan=plan)

    def with_fetch(self, fetch: RowFetch) -> "Episodes":
        """Return these episodes with their rows on the way."""
        return replace(self, fetch=fetch)

    def to(self, device: torch.device) -> "Episodes":
        """Return a copy on a device."""
        (there,) = move_episodes((self,), device)
        return there

    def with_events(self, events: EventLayout) -> "Episodes":
        """Return these episodes with what their rows know of events."""
        return replace(self, held=self.inputs._replace(events=events))

    def pack(self) -> "Episodes":
        """Return the episodes in one block of memory, which `to` copies to a GPU at once."""
        (there,) = pack_episodes((self,))
        return there

    def working_rows_PD(self, rows_UD: Tensor) -> Tensor:
        """Return the rows that the sides index: each task's own copies where embeddings adapt."""
        return rows_UD if self.copies is None else self.copies.pool(rows_UD)


def move_episodes(parts: tuple[Episodes, ...], device: torch.device) -> tuple[Episodes, ...]:
    """Return the parts of a step on a device, in one copy if `pack_episodes` made them."""
    return with_trees(parts, send_to_device(device_trees(parts), device))


def pack_episodes(parts: tuple[Episodes, ...]) -> tuple[Episodes, ...]:
    """Return the parts of a step in one block of pinned memory."""
    return with_trees(parts, pack(device_trees(parts)))


def device_trees(parts: tuple[Episodes, ...]) -> list[Any]:
    """Return what a device needs of the parts of a step; the first one has the plan of all."""
    plan = parts[0].plan
    return [*(part.held for part in parts), *([] if plan is None else [plan.numbers])]


def with_trees(parts: tuple[Episodes, ...], trees: list[Any]) -> tuple[Episodes, ...]:
    """Return the parts with these in place of their `device_trees`."""
    plan = parts[0].plan
    # The first part carries the plan of all: it is needed once.
    plans = [plan if plan is None else RowPlan(plan.known, trees[-1])] + [None] * len(parts)
    return tuple(
        replace(part, held=tree, plan=own)
        for part, tree, own in zip(parts, trees, plans, strict=False)
    )


def collate_plain_rows(batch: TaskBatch, device: str) -> Episodes:
    """Return every row of the batch on its own, whatever its task and side."""
    return Episodes.of(batch, None, make_full_side(batch, device=device), batch.num_rows)


def make_full_side(
    batch: TaskBatch, constant: bool = False, num_rows: int | None = None, device: str = "cpu"
) -> Side:
    """Return all rows of the batch as one side, which reads from the fetched rows, or from
    `num_rows` copies (`with_row_copies`); `constant` ones have no gradient."""
    if num_rows is None:
        num_rows = batch.unique_ids_U.numel()
    every_row_N = torch.ones(batch.num_rows, dtype=torch.bool)
    lengths_T = batch.row_offsets_T1.diff()
    return _make_side(batch, every_row_N, lengths_T, num_rows, constant, device)


def collate_support_query(
    batch: TaskBatch, rows_per_task: bool, to_predict: bool = False
) -> Episodes:
    """Return both sides of every task; with `rows_per_task` each has its own copies of rows."""
    batch, fetched_row_P, num_rows = with_row_copies(batch, rows_per_task)
    # To predict, only copies that adapt have a gradient: the inner steps take it.
    constant_sides = to_predict and not rows_per_task, to_predict
    (sides,) = _make_sides(batch, [np.arange(batch.num_tasks)], num_rows, constant_sides)
    episodes = Episodes.of(batch, fetched_row_P, sides, _num_with_query(batch), to_predict)
    if to_predict and batch.row_id_N.numel():
        episodes = replace(episodes, query_row_id_N=batch.row_id_N[~_support_rows_N(batch)])
    return episodes


def with_query_items(episodes: Episodes, batch: TaskBatch, item: int) -> Episodes:
    """Return the episodes of a batch with the item of each query row, from a single-id feature."""
    position_N = batch.positions_NF[~_support_rows_N(batch), item]
    return replace(episodes, query_item_N=batch.unique_ids_U[position_N])


def with_known_items(episodes: Episodes, batch: TaskBatch) -> Episodes:
    """Return the episodes of a batch with the items of the events that each query row knows."""
    query_N = ~_support_rows_N(batch)
    rows_T, num_events_T = batch.row_offsets_T1.diff(), batch.num_events_T
    task_N = torch.repeat_interleave(torch.arange(batch.num_tasks), rows_T)[query_N]
    before_N = batch.events_before_N[query_N].to(torch.int64)
    first_N = (num_events_T.cumsum(0) - num_events_T)[task_N]
    index_V = torch.from_numpy(ragged_indices(first_N.numpy(), before_N.numpy()))
    event_item = batch.unique_ids_U[batch.event_positions[:, 0].to(torch.int64)]
    return replace(episodes, query_known=(event_item[index_V], before_N))


def with_sampled(episodes: Episodes, batch: TaskBatch, is_sampled_N: Tensor) -> Episodes:
    """Return the episodes of a batch with which of its query rows were sampled."""
    return replace(episodes, query_sampled_N=is_sampled_N[~_support_rows_N(batch)])


def collate_task_groups(
    batch: TaskBatch, rows_per_task: bool, least_gain: float, device: str
) -> Episodes:
    """Return both sides of every task in groups; a cut saves at least `least_gain` padding rows."""
    # By the stored rows: copies of embedding rows change no task's length.
    groups = group_tasks(*side_lengths(batch), least_gain)
    batch, fetched_row_P, num_rows = with_row_copies(batch, rows_per_task)
    rows = TaskGroups(_make_sides(batch, groups, num_rows, device=device))
    return Episodes.of(batch, fetched_row_P, rows, _num_with_query(batch), device=device)


def with_row_copies(batch: TaskBatch, rows_per_task: bool) -> tuple[TaskBatch, Tensor | None, int]:
    """Return the batch with its positions into the tasks' own copies of rows if they have such, the
    fetched row behind each, and the number of rows."""
    if not rows_per_task:
        return batch, None, batch.unique_ids_U.numel()
    rows = deduplicate_task_rows(batch)
    batch = replace(batch, positions_NF=rows.positions_NF, multi_positions_V=rows.multi_positions_V)
    return batch, rows.level1_position_P, rows.level1_position_P.numel()


def side_lengths(batch: TaskBatch) -> tuple[Int64, Int64]:
    """Return the numbers of support and query rows of each task."""
    support_T = batch.support_lengths_T.numpy().astype(np.int64)
    return support_T, batch.row_offsets_T1.diff().numpy() - support_T


def _num_with_query(batch: TaskBatch) -> int:
    return int(np.count_nonzero(side_lengths(batch)[1]))


def _make_sides(
    batch: TaskBatch,
    groups: Sequence[Int64],
    num_rows: int,
    constant_sides: tuple[bool, bool] = (False, False),
    device: str = "cpu",
) -> tuple[Sides, ...]:
    support_T, rows_T = batch.support_lengths_T, batch.row_offsets_T1.diff()
    task_N = torch.repeat_interleave(torch.arange(batch.num_tasks), rows_T)
    is_support_N = _support_rows_N(batch)
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
            _make_side(batch, *rows, num_rows, constant, device)
            for rows, constant in zip(rows_of_sides, constant_sides, strict=True)
        )
        found.append(Sides(*sides))
    return tuple(found)


def _support_rows_N(batch: TaskBatch) -> Tensor:
    # An episode's support rows come first.
    task_N = torch.repeat_interleave(torch.arange(batch.num_tasks), batch.row_offsets_T1.diff())
    within_N = torch.arange(batch.num_rows) - batch.row_offsets_T1[task_N]
    is_support_N: Tensor = within_N < batch.support_lengths_T[task_N]
    return is_support_N


def _make_side(
    batch: TaskBatch, mask_N: Tensor, lengths_T: Tensor, num_rows: int, constant: bool, device: str
) -> Side:
    index = mask_N.nonzero().squeeze(1)
    lengths_NM = batch.multi_lengths_NM.index_select(0, index)
    bag_sizes = lengths_NM.reshape(-1).to(torch.int64)
    values_N = batch.multi_lengths_NM.sum(dim=1)
    # Values stand row by row: a row's mask holds for all of its values.
    bag_positions_V = batch.multi_positions_V[torch.repeat_interleave(mask_N, values_N)]
    single_positions_V = batch.positions_NF.index_select(0, index).flatten()
    label_N = batch.label_N.index_select(0, index)
    weight_N = batch.weight_N[index] if batch.weight_N.numel() else batch.weight_N
    return Side(
        layout=RowLayout.of(lengths_T),
        label_N=label_N,
        weight=label_weights(label_N, weight_N),
        dense_NK=batch.dense_NK.index_select(0, index),
        num_single=batch.positions_NF.shape[1],
        single_rows=Bags.single(single_positions_V, num_rows, constant, device),
        bag_rows=Bags.single(bag_positions_V, num_rows, constant, device),
        bag_index_V=torch.repeat_interleave(torch.arange(bag_sizes.numel()), bag_sizes),
        longest_M=tuple(lengths_NM.numpy().max(axis=0, initial=0).tolist()),
        row_N=index if batch.event_positions.shape[1] else None,
    )
