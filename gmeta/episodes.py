"""From a TaskBatch to what a meta-step needs: ids to fetch, each task's own rows, support and query
sides.

All of it is integer bookkeeping, done on the host before anything goes to a device.

Shape suffixes: T episodes, N rows, B tables, U fetched rows, P distinct (task, row) pairs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gmeta.adaptation.layout import RowLayout
from gmeta.adaptation.side import Side
from metaio.batch import TaskBatch
from metaio.task_rows import task_rows


class RowFetch(ABC):
    """The rows of a step on their way from the ranks that hold them. All ranks make the same calls
    in the same order.
    """

    @abstractmethod
    def send(self) -> None:
        """Let the ids travel."""

    @abstractmethod
    def rows_UD(self, gradient_unit: float) -> Tensor:
        """The rows as they are now, differentiable; `gradient_unit` is about the size of their
        gradients, the same on every rank.
        """


@dataclass(frozen=True)
class Episodes:
    """A rank's share of a step. `support` is None for plain training: then every row is a query
    row.
    """

    task_T: Tensor  # which task each episode is of; stays on the host
    unique_ids_U: Tensor
    unique_lengths_B: Tensor
    # The fetched row behind each row that the sides index; None when they index the fetched rows
    # themselves.
    fetched_row_P: Tensor | None
    support: Side | None
    query: Side
    num_terms: int  # of the outer loss: tasks with query rows; rows if plain
    num_rows: int
    # Where the row behind each of the P stands among the fetched rows, if not in the order of ids.
    source_row_P: Tensor | None = None
    fetch: RowFetch | None = None  # None: no rank was told yet which rows are needed

    def fetched_by(self, fetch: RowFetch, place_U: Tensor | None = None) -> "Episodes":
        """These episodes with their rows on the way; `place_U` is where the row of each id will
        stand among the fetched rows (None: in the order of ids).
        """
        if place_U is None:
            return replace(self, fetch=fetch)
        if self.fetched_row_P is not None:
            return replace(self, fetch=fetch, source_row_P=place_U[self.fetched_row_P])
        support = None if self.support is None else self.support.moved(place_U)
        return replace(self, fetch=fetch, support=support, query=self.query.moved(place_U))

    def to(self, device: torch.device) -> "Episodes":
        """Copy to a device."""
        return replace(
            self,
            unique_ids_U=self.unique_ids_U.to(device, non_blocking=True),
            unique_lengths_B=self.unique_lengths_B.to(device, non_blocking=True),
            fetched_row_P=None
            if self.fetched_row_P is None
            else self.fetched_row_P.to(device, non_blocking=True),
            support=None if self.support is None else self.support.to(device),
            query=self.query.to(device),
        )

    def working_rows_PD(self, rows_UD: Tensor) -> Tensor:
        """The rows that the sides index: each task's own copy where embeddings adapt."""
        source_row_P = self.fetched_row_P if self.source_row_P is None else self.source_row_P
        return rows_UD if source_row_P is None else rows_UD.index_select(0, source_row_P)


def plain_rows(batch: TaskBatch) -> Episodes:
    """Every row of the batch on its own, whatever its task and side."""
    every_row_N = torch.ones(batch.num_rows, dtype=torch.bool)
    query = _side(batch, every_row_N, batch.row_offsets_T1.diff())
    return Episodes(
        task_T=batch.task_T,
        unique_ids_U=batch.unique_ids_U,
        unique_lengths_B=batch.unique_lengths_B,
        fetched_row_P=None,
        support=None,
        query=query,
        num_terms=batch.num_rows,
        num_rows=batch.num_rows,
    )


def support_and_query(batch: TaskBatch, rows_per_task: bool) -> Episodes:
    """Both sides of every task; with `rows_per_task` each task gets its own copy of the rows it
    uses.
    """
    fetched_row_P = None
    if rows_per_task:
        rows = task_rows(batch)
        fetched_row_P = rows.level1_position_P
        batch = replace(
            batch, positions_NF=rows.positions_NF, multi_positions_V=rows.multi_positions_V
        )
    rows_T = batch.row_offsets_T1.diff()
    task_N = torch.repeat_interleave(torch.arange(batch.num_tasks), rows_T)
    within_N = torch.arange(batch.num_rows) - batch.row_offsets_T1[task_N]
    is_support_N = within_N < batch.support_lengths_T[task_N]
    query_T = rows_T - batch.support_lengths_T
    return Episodes(
        task_T=batch.task_T,
        unique_ids_U=batch.unique_ids_U,
        unique_lengths_B=batch.unique_lengths_B,
        fetched_row_P=fetched_row_P,
        support=_side(batch, is_support_N, batch.support_lengths_T),
        query=_side(batch, ~is_support_N, query_T),
        num_terms=int((query_T > 0).sum()),
        num_rows=batch.num_rows,
    )


def _side(batch: TaskBatch, mask_N: Tensor, lengths_T: Tensor) -> Side:
    index = mask_N.nonzero().squeeze(1)
    bag_sizes = batch.multi_lengths_NM.index_select(0, index).reshape(-1).to(torch.int64)
    values_N = batch.multi_lengths_NM.sum(dim=1)
    return Side(
        layout=RowLayout.of(lengths_T),
        label_N=batch.label_N.index_select(0, index),
        dense_NK=batch.dense_NK.index_select(0, index),
        positions_NF=batch.positions_NF.index_select(0, index),
        bag_positions_V=batch.multi_positions_V[torch.repeat_interleave(mask_N, values_N)],
        bag_index_V=torch.repeat_interleave(torch.arange(bag_sizes.numel()), bag_sizes),
        num_multi=batch.multi_lengths_NM.shape[1],
    )
