"""Collating: from a TaskBatch to the episodes that a learner takes, padded for the fused loop.

Shape suffixes: T tasks, N rows, H longest list or task, F single-id or pooled features, M multi-id
features, C jagged lists, V values, K dense columns, U unique ids, P task-row pairs"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import pad

from gmeta.adaptation.adaptation_plan import Route
from gmeta.adaptation.layout.common_features import CommonFeatures
from gmeta.adaptation.layout.padded_layout import (
    FusedLayout,
    PaddedFeatures,
    PaddedHistory,
    PaddedRows,
    PaddedTasks,
    Rectangle,
)
from gmeta.adaptation.layout.sparse_matrix import Bags
from gmeta.data.accumulate import MicroBatches
from gmeta.data.buckets import FETCHED, ROWS, ROWS_OF_LONG, TASKS, VALUES, choose_cuts
from gmeta.data.episodes import (
    Episodes,
    collate_plain_rows,
    collate_task_groups,
    side_lengths,
    with_row_copies,
)
from gmeta.data.event_layout import EventColumns
from gmeta.data.features.item_statistics import FoldStatistics
from gmeta.data.features.support_statistics import SupportStatistics
from gmeta.data.neighbour_counts import NeighbourLists
from gmeta.data.task_groups import RECTANGLE_WORK, TaskGroup, group_tasks, least_gain
from gmeta.losses.objectives import label_weights
from metaio.ragged import Int64, offsets, owners, ragged_indices
from metaio.read.batch import TaskBatch

# Below this many multiply-adds in a product of rows, splitting off what tasks share costs more in
# calls than it saves. At 5 million it breaks even on one thread, and costs 6 % of a step on two,
# which share the products but not the calls. On CUDA about 15 launches, estimated.
LEAST_COMMON_WORK = {"cpu": 8_000_000, "cuda": 2_000_000_000}


@dataclass(frozen=True)
class CollateOptions:
    """What collating a batch needs to know of the learner, without its weights."""

    # Pickled: worker processes collate with it.
    device: str  # the kind that the learner computes on
    items: FoldStatistics | None
    neighbours: NeighbourLists | None
    statistics: SupportStatistics
    route: Route
    plain_epochs: int  # the first ones are of plain training
    layout: FusedLayout | None  # of the fused route
    rows_per_task: bool
    least_gain: float  # rows that one more group of tasks must save in that loop
    learns_from_support: bool
    events: EventColumns | None = None  # None: no encoder reads them

    def collator_of(self, epoch: int) -> Callable[[TaskBatch], Episodes]:
        """Return `collate` for the batches of one epoch."""
        return lambda batch: self.collate(batch, epoch)

    def with_drawn_items(
        self, batches: Iterator[TaskBatch], epoch: int, step: int
    ) -> Iterator[TaskBatch]:
        """Return the batches of an epoch's steps, from this one on, with the items that the loss
        draws for each."""
        draws = None if self.events is None else self.events.draws
        return batches if draws is None else draws.add_to(batches, epoch, step)

    def with_features(self, batch: TaskBatch) -> TaskBatch:
        """Return a training batch with all statistics of each row behind its dense columns."""
        if self.items is not None:
            batch = self.items.with_features(batch)
        return self.statistics.with_features(batch, self.neighbours)

    def collate(self, batch: TaskBatch, epoch: int) -> Episodes:
        """Return the input of the learner's `forward` in this epoch of a run, counted from 0."""
        batch = self.with_features(batch)
        episodes = self._collate_rows(batch, epoch)
        if self.events is None:
            return episodes
        in_buckets = episodes.num_fetched > 0
        return episodes.with_events(self.events.lay_out(batch, in_buckets))

    def _collate_rows(self, batch: TaskBatch, epoch: int) -> Episodes:
        if self.route == "plain" or epoch < self.plain_epochs:
            return collate_plain_rows(batch, self.device)
        if self.layout is not None:
            groups = group_similar_tasks(batch, self.layout)
            # Without support rows nothing adapts, and the fused loop has no rectangle.
            if any(group.support_rows for group in groups):
                return collate_padded(batch, groups, self.layout)
        episodes = collate_task_groups(batch, self.rows_per_task, self.least_gain, self.device)
        if self.learns_from_support:
            support_T, query_T = side_lengths(batch)
            # Reptile's terms are tasks with support rows; a loss to report takes query rows, too.
            num_terms, num_reported = np.count_nonzero([support_T, support_T * query_T], axis=1)
            episodes = replace(episodes, num_terms=int(num_terms), num_reported=int(num_reported))
        return episodes


def collate_in_parts(
    collate: Callable[[TaskBatch], Episodes], num_parts: int
) -> Callable[[TaskBatch], Episodes | MicroBatches]:
    """Return a function that collates the batch of a step in `num_parts` parts."""
    if num_parts == 1:
        return collate
    return lambda batch: MicroBatches(
        tuple(collate(part) for part in split_tasks(batch, num_parts))
    )


def split_tasks(batch: TaskBatch, num_parts: int) -> list[TaskBatch]:
    """Return at most `num_parts` batches of about as many rows each, cut between tasks."""
    # Every part keeps the whole batch's unique ids: they are fetched once for all of them.
    offsets_T1 = batch.row_offsets_T1
    num_parts = max(1, min(num_parts, batch.num_rows))  # no cut lies between two rows twice
    targets = torch.arange(1, num_parts) * batch.num_rows / num_parts
    # Where the rows of a part are reached; a task longer than a part makes two cuts one.
    cuts = torch.searchsorted(offsets_T1, targets.round().to(offsets_T1.dtype))
    edges = sorted({0, *cuts.tolist(), batch.num_tasks})
    if len(edges) == 1:
        return [batch]
    return [batch.tasks(begin, end) for begin, end in pairwise(edges)]


def group_similar_tasks(batch: TaskBatch, layout: FusedLayout) -> list[TaskGroup]:
    """Return the tasks with query rows in groups of similar size."""
    support_T, query_T = side_lengths(batch)
    # No loss depends on how a task without query rows adapts.
    with_query = np.flatnonzero(query_T)
    gain = least_gain(RECTANGLE_WORK, layout.device, layout.num_weights)
    if layout.in_buckets:
        return _groups_in_buckets(support_T, query_T, with_query, layout)
    groups = [
        with_query[group] for group in group_tasks(support_T[with_query], query_T[with_query], gain)
    ]
    return [
        TaskGroup(tasks, int(support_T[tasks].max()), int(query_T[tasks].max())) for tasks in groups
    ]


def _groups_in_buckets(
    support_T: Int64, query_T: Int64, with_query: Int64, layout: FusedLayout
) -> list[TaskGroup]:
    """Return these tasks, the shortest first, in groups of few sizes (buckets.py)."""
    tasks = with_query[np.argsort((support_T + query_T)[with_query], kind="stable")]
    number = TASKS.round_up(len(tasks))
    tasks = np.pad(tasks, (number - len(tasks), 0), constant_values=-1)
    # As on CUDA, on any device: these shapes are for graphs, which have few rectangles.
    gain = least_gain(RECTANGLE_WORK, "cuda", layout.num_weights)
    groups: list[TaskGroup] = []
    places = choose_cuts(number)[:-1]
    for place, part in enumerate(np.split(tasks, places)):
        there, rows = part[part >= 0], ROWS if place < len(places) - 1 else ROWS_OF_LONG
        sizes = [
            rows.round_up(int(side_T[there].max(initial=0))) for side_T in (support_T, query_T)
        ]
        group = TaskGroup(part, *sizes)
        # Neighbours become one group where one more rectangle costs more than it saves.
        if groups:
            merged = TaskGroup(
                np.concatenate([groups[-1].tasks, part]),
                max(groups[-1].support_rows, group.support_rows),
                max(groups[-1].query_rows, group.query_rows),
            )
            separate_rows = groups[-1].num_rows + group.num_rows
            # Padding tasks alone make no rectangle.
            if not groups[-1].num_rows or merged.num_rows - separate_rows < gain:
                groups[-1] = merged
                continue
        groups.append(group)
    return groups


def collate_padded(batch: TaskBatch, groups: Sequence[TaskGroup], layout: FusedLayout) -> Episodes:
    """Return both sides of these groups of tasks, as the fused loop takes them."""
    batch, fetched_row_P, num_rows = with_row_copies(batch, layout.rows_per_task)
    num_fetched = batch.unique_ids_U.numel()
    if not num_fetched:
        # Padding entries would read the first row, and there is none.
        layout = replace(layout, in_buckets=False)
    if layout.in_buckets:
        num_rows, num_fetched = FETCHED.round_up(num_rows), FETCHED.round_up(num_fetched)
    unsplit, common_F = batch, _common_features(batch, layout)
    if common_F is not None:
        batch = replace(batch, positions_NF=batch.positions_NF[:, ~common_F])
    starts_T, ends_T = batch.row_offsets_T1[:-1].numpy(), batch.row_offsets_T1[1:].numpy()
    middles_T = starts_T + batch.support_lengths_T.numpy()
    tasks = [group.tasks for group in groups]
    sides = [group.support_rows for group in groups], [group.query_rows for group in groups]
    support, support_N = _pad_rows(batch, starts_T, middles_T, tasks, sides[0], layout.dtype)
    query, query_N = _pad_rows(batch, middles_T, ends_T, tasks, sides[1], layout.dtype)
    features: tuple[PaddedFeatures, ...]
    if layout.stacked:
        both_N = np.concatenate([support_N, query_N])
        features = (_pad_features(batch, both_N, layout, num_rows),)
    else:
        features = (
            _pad_features(batch, support_N, layout, num_rows, layout.constant_support),
            _pad_features(batch, query_N, layout, num_rows),
        )
    common = None
    if common_F is not None:
        in_order_T = np.concatenate(tasks)
        common = _common_block(unsplit, common_F, in_order_T, num_rows, layout)
    rows = PaddedTasks(support, query, features, common)
    num_terms = sum(int(np.count_nonzero(group >= 0)) for group in tasks)
    if not layout.in_buckets:
        return Episodes.of(batch, fetched_row_P, rows, num_terms, device=layout.device)
    episodes = Episodes.of(batch, None, rows, num_terms)
    if fetched_row_P is not None:
        missing = num_rows - fetched_row_P.numel()
        lengths = pad(torch.ones_like(fetched_row_P), (0, missing))
        copies = Bags.of(
            fetched_row_P, lengths, None, num_fetched, num_entries=num_rows, device=layout.device
        )
        fetched_row_P = pad(fetched_row_P, (0, missing))
        held = episodes.inputs._replace(fetched_row_P=fetched_row_P, copies=copies)
        episodes = replace(episodes, held=held)
    return replace(episodes, num_fetched=num_fetched)


def _common_features(batch: TaskBatch, layout: FusedLayout) -> torch.Tensor | None:
    """Return which single-id features are equal on all rows of each task [F]; None: too few."""
    weights, least_work = layout.first_layer_weights, LEAST_COMMON_WORK[layout.device]
    num_features = batch.positions_NF.shape[1] + batch.multi_lengths_NM.shape[1]
    if batch.num_rows * weights < least_work:
        return None
    positions_NF, starts_T = batch.positions_NF.numpy(), batch.row_offsets_T1[:-1].numpy()
    as_before_NF = positions_NF[1:] == positions_NF[:-1]
    # A task's first row need not be as the row before it, which is another task's.
    as_before_NF[starts_T[(starts_T > 0) & (starts_T < batch.num_rows)] - 1] = True
    common_F = as_before_NF.all(axis=0)
    if common_F.all() and num_features == common_F.size and not batch.dense_NK.shape[1]:
        common_F[-1:] = False  # rows without any input of their own are not worth the care
    saved = batch.num_rows * weights * np.count_nonzero(common_F) / num_features
    return torch.from_numpy(common_F) if saved >= least_work else None


def _common_block(
    batch: TaskBatch, common_F: torch.Tensor, tasks: Int64, num_rows: int, layout: FusedLayout
) -> CommonFeatures:
    # Padding tasks have no row to read: their lists are empty.
    is_there_T = torch.from_numpy(tasks >= 0)
    first_rows = batch.row_offsets_T1[torch.from_numpy(tasks)[is_there_T]]
    positions = batch.positions_NF[first_rows][:, common_F].flatten()
    features = tuple(common_F.nonzero().squeeze(1).tolist())
    lengths = is_there_T.to(torch.int64).repeat_interleave(len(features))
    num_entries = len(lengths) if layout.in_buckets else 0
    bags = Bags.of(
        positions, lengths, None, num_rows, num_entries=num_entries, device=layout.device
    )
    return CommonFeatures(features, bags)


def _pad_rows(
    batch: TaskBatch,
    start_T: Int64,
    end_T: Int64,
    groups: list[Int64],
    rows_of_groups: list[int],
    dtype: torch.dtype,
) -> tuple[PaddedRows, Int64]:
    """Return rows start to end of each task, group by group, and their places [N]; -1: padding."""
    rectangles, row_N, share_N, first = [], [], [], 0
    for tasks, longest in zip(groups, rows_of_groups, strict=True):
        lengths = np.where(tasks >= 0, (end_T - start_T)[tasks], 0)
        within = np.arange(longest)
        there = within < lengths[:, None]
        row_N.append(np.where(there, start_T[tasks, None] + within, -1).ravel())
        # A padding row has no share in any mean: its output, loss and gradient count nothing.
        share_N.append((there / np.maximum(lengths, 1)[:, None]).ravel())
        rectangles.append(Rectangle(first, len(tasks), longest))
        first += len(tasks) * longest
    rows_N = np.concatenate(row_N)
    per_task = np.repeat([mine.rows for mine in rectangles], [mine.tasks for mine in rectangles])
    # Padding rows read the batch's first: any numbers but NaN do where the weight is 0.
    stored_N = torch.from_numpy(np.maximum(rows_N, 0))
    label_N = batch.label_N.index_select(0, stored_N)
    weight_N = batch.weight_N[stored_N] if batch.weight_N.numel() else batch.weight_N
    rows = PaddedRows(
        rectangles=tuple(rectangles),
        label_N=label_N,
        weight=label_weights(label_N, weight_N),
        share_N=torch.from_numpy(np.concatenate(share_N)).to(dtype),
        task_N=torch.from_numpy(owners(per_task)),
    )
    return rows, rows_N


def _pad_features(
    batch: TaskBatch, rows_N: Int64, layout: FusedLayout, num_rows: int, constant: bool = False
) -> PaddedFeatures:
    """Return the features of these rows; no gradient is taken of `constant` ones."""
    there_N1 = torch.from_numpy(rows_N >= 0).unsqueeze(1)
    dense_NK = batch.dense_NK.index_select(0, torch.from_numpy(np.maximum(rows_N, 0)))
    has_history = layout.history is not None
    return PaddedFeatures(
        bags=_make_bags(batch, rows_N, layout, num_rows, constant),
        num_features=batch.positions_NF.shape[1] + batch.multi_lengths_NM.shape[1],
        history=_make_history(batch, rows_N, layout, num_rows, constant) if has_history else None,
        dense_NK=dense_NK * there_N1,
        row_N=torch.from_numpy(np.maximum(rows_N, 0)) if batch.event_positions.shape[1] else None,
    )


def _make_bags(
    batch: TaskBatch, rows_N: Int64, layout: FusedLayout, num_rows: int, constant: bool
) -> Bags:
    """Return bags of each row's features, single then multi-id."""
    num_single, num_multi = batch.positions_NF.shape[1], batch.multi_lengths_NM.shape[1]
    if layout.device != "cpu" and not num_multi and batch.num_rows:
        # A padding row reads another row's features, as it weighs nothing: each reads a different
        # row's, since additions to the same row of a table wait for each other.
        read_N = np.where(rows_N >= 0, rows_N, np.arange(len(rows_N)) % batch.num_rows)
        index_V = batch.positions_NF[torch.from_numpy(read_N)].flatten()
        return Bags.single(index_V, num_rows, constant, layout.device)
    # The history's bags and, on a CPU, those of padding rows are empty.
    real = np.flatnonzero(rows_N >= 0)
    real_rows = rows_N[real]
    history = -1 if layout.history is None else layout.history
    pooled_M = np.flatnonzero(np.arange(num_multi) != history)
    values_V, lengths_NM = _values(batch, real_rows, pooled_M)
    # 32 bits: summing as many numbers of 64 bits takes twice as long.
    lengths_NC = np.zeros((len(rows_N), num_single + num_multi), np.int32)
    lengths_NC[real, :num_single] = 1
    lengths_NC[real[:, None], num_single + pooled_M] = lengths_NM
    lengths = torch.from_numpy(lengths_NC.ravel())
    single_NF = batch.positions_NF.numpy()[real_rows]
    num_entries = 0
    if layout.in_buckets:
        num_values = VALUES.round_up(max(values_V.size, 1)) if pooled_M.size else 0
        num_entries = len(rows_N) * num_single + num_values
    # Entries in the order of rows: each row's single ids, then its multi-id values.
    values_N = lengths_NM.sum(axis=1)
    # In the order of rows, as gradients are added up: a row's embeddings lie side by side.
    row_starts_N = offsets(num_single + values_N)[:-1]
    place_V = ragged_indices(row_starts_N + num_single, values_N)
    entries = np.empty(single_NF.size + values_V.size, single_NF.dtype)
    entries[row_starts_N[:, None] + np.arange(num_single)] = single_NF
    entries[place_V] = values_V
    weight_V = None
    if layout.pooling == "mean" and num_multi:
        weights = np.ones(entries.size)
        bag_sizes = lengths_NM.ravel()
        weights[place_V] = np.repeat(1.0 / np.maximum(bag_sizes, 1), bag_sizes)
        weight_V = torch.from_numpy(weights)
    entries_V = torch.from_numpy(entries)
    # In few shapes: a batch in which no bag has two values is laid out as any other.
    multi_row = layout.in_buckets and pooled_M.size > 0
    sizes = num_rows, constant, num_entries
    return Bags.of(entries_V, lengths, weight_V, *sizes, layout.device, multi_row)


def _make_history(
    batch: TaskBatch, rows_N: Int64, layout: FusedLayout, num_rows: int, constant: bool
) -> PaddedHistory:
    """Return the values of the layout's history, one by one; padding rows have none."""
    there_N = rows_N >= 0
    values_V, lengths_N1 = _values(batch, rows_N[there_N], np.array([layout.history]))
    lengths_N = np.zeros(len(rows_N), np.int64)
    lengths_N[there_N] = lengths_N1[:, 0]
    longest, num_entries = int(lengths_N.max(initial=0)), 0
    if layout.in_buckets:
        # At least 1: no list at all would be one more shape.
        longest = ROWS_OF_LONG.round_up(max(longest, 1))
        num_entries = VALUES.round_up(max(values_V.size, 1))
    there_NH = torch.from_numpy(np.arange(longest) < lengths_N[:, None])
    lengths = there_NH.flatten().to(torch.int64)
    index_V = torch.from_numpy(values_V)
    bags = Bags.of(index_V, lengths, None, num_rows, constant, num_entries, layout.device)
    return PaddedHistory(bags, there_NH)


def _values(batch: TaskBatch, rows_N: Int64, features_M: Int64) -> tuple[Int64, Int64]:
    """Return these multi-id features' positions in these rows [V], and how many each has [N, M]."""
    lengths_NM = batch.multi_lengths_NM.numpy().astype(np.int64)
    starts_NM = offsets(lengths_NM.ravel())[:-1].reshape(lengths_NM.shape)
    chosen = np.ix_(rows_N, features_M)
    chosen_lengths_NM = lengths_NM[chosen]
    index_V = ragged_indices(starts_NM[chosen].ravel(), chosen_lengths_NM.ravel())
    return batch.multi_positions_V.numpy()[index_V], chosen_lengths_NM
