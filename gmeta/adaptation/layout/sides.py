"""The support rows, or the query rows, of all tasks of a batch, and the embedding rows they read.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns, D embedding width, P task-row pairs"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.adaptation.layout.sparse_matrix import Bags
from gmeta_models.inputs import RowInputs


@dataclass(frozen=True)
class WorkingRows:
    """The embedding rows that the sides index, and the rate at which they adapt."""

    # Where embeddings adapt, every (task, id) has a row of its own.
    values_PD: Tensor
    rate: float | Tensor  # broadcasts against values_PD


@dataclass(frozen=True)
class Side:
    """Rows task by task, reading from a block of embedding rows [P, D] that is fetched later."""

    layout: RowLayout
    label_N: Tensor  # [N, labels] of several
    dense_NK: Tensor
    num_single: int  # F
    single_rows: Bags  # row n's single-id features are n * F to (n + 1) * F
    bag_rows: Bags  # of the V ids of all bags
    bag_index_V: Tensor
    longest_M: tuple[int, ...]  # of each multi-id feature, the longest bag
    # Of each label in its row's loss: objectives.label_weights.
    weight: Tensor | None = None
    # Which row of the batch each is, where events make inputs of it; None: they do not.
    row_N: Tensor | None = None
    bag_NM: Tensor | None = None  # see RowInputs

    def inputs(self, rows_PD: Tensor) -> RowInputs:
        """Return what the model sees when the embedding rows have these values."""
        num_rows, width = len(self.label_N), rows_PD.shape[1]
        return RowInputs(
            single_NFD=self.single_rows.pool(rows_PD).view(num_rows, self.num_single, width),
            bag_values_VD=self.bag_rows.pool(rows_PD),
            bag_index_V=self.bag_index_V,
            num_multi=len(self.longest_M),
            dense_NK=self.dense_NK.to(rows_PD.dtype),
            longest_M=self.longest_M,
            bag_NM=self.bag_NM,
        )


class Sides(NamedTuple):
    """The support and the query rows of the same tasks."""

    support: Side
    query: Side


@dataclass(frozen=True)
class TaskGroups:
    """The tasks of a batch in groups of similar size."""

    # Products inside each task pad to the group's longest.
    groups: tuple[Sides, ...]
