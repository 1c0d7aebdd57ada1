"""The support rows, or the query rows, of all tasks of a batch: which rows of one block they read.

Shape suffixes: N rows, P rows of the block, D embedding width, F single-id features, V ids of all
bags, K dense columns.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gmeta.adaptation.rows.ragged import RowLayout
from gmeta.adaptation.rows.sparse_matrix import Bags
from gmeta_models.inputs import RowInputs


@dataclass(frozen=True)
class WorkingRows:
    """The embedding rows that the sides index, and the rate at which they adapt.

    Where embeddings adapt, every (task, id) has a row of its own.
    """

    values_PD: Tensor
    rate: float | Tensor  # broadcasts against values_PD


@dataclass(frozen=True)
class Side:
    """Rows task by task, reading from a block of embedding rows [P, D] that is fetched later."""

    layout: RowLayout
    label_N: Tensor
    dense_NK: Tensor
    num_single: int  # F
    single_rows: Bags  # row n's single-id features are n * F to (n + 1) * F
    bag_rows: Bags  # of the V ids of all bags
    bag_index_V: Tensor
    num_multi: int

    def inputs(self, rows_PD: Tensor) -> RowInputs:
        """Return what the model sees when the embedding rows have these values."""
        num_rows, width = self.label_N.numel(), rows_PD.shape[1]
        return RowInputs(
            single_NFD=self.single_rows.pool(rows_PD).view(num_rows, self.num_single, width),
            bag_values_VD=self.bag_rows.pool(rows_PD),
            bag_index_V=self.bag_index_V,
            num_multi=self.num_multi,
            dense_NK=self.dense_NK.to(rows_PD.dtype),
        )

    def to(self, device: torch.device) -> "Side":
        """Copy it to a device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            layout=self.layout.to(device),
            label_N=move(self.label_N),
            dense_NK=move(self.dense_NK),
            single_rows=self.single_rows.to(device),
            bag_rows=self.bag_rows.to(device),
            bag_index_V=move(self.bag_index_V),
        )


class Sides(NamedTuple):
    """The support and the query rows of the same tasks."""

    support: Side
    query: Side

    def to(self, device: torch.device) -> "Sides":
        """Copy it to a device."""
        return Sides(self.support.to(device), self.query.to(device))


@dataclass(frozen=True)
class TaskGroups:
    """The tasks of a batch in groups of similar size, as products inside each task pad to the
    group's longest.
    """

    groups: tuple[Sides, ...]

    def to(self, device: torch.device) -> "TaskGroups":
        """Copy it to a device."""
        return TaskGroups(tuple(sides.to(device) for sides in self.groups))
