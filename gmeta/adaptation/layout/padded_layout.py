"""The rows of many tasks as [tasks, rows] rectangles, tasks of similar size in one; padded on the
host, so that products inside each task need no copies.

Shape suffixes: T tasks, N rows, H longest list or task, F single-id or pooled features, K dense
columns, D embedding width, P task-row pairs, X all inputs side by side"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from gmeta.adaptation.layout.sparse_matrix import Bags
from gmeta_models.inputs import History, RowFeatures

if TYPE_CHECKING:
    from gmeta.adaptation.layout.common_features import CommonFeatures
    from gmeta_models.model_config import Pooling


class Rectangle(NamedTuple):
    """Rows [first, first + tasks * rows) of a side."""

    first: int
    tasks: int
    rows: int

    def of(self, rows_NX: Tensor) -> Tensor:
        """Return a view of these rows of a contiguous tensor: [tasks, rows, X]."""
        count = self.tasks * self.rows
        num_rows, width = rows_NX.shape
        mine_NX = rows_NX if count == num_rows else rows_NX.narrow(0, self.first, count)
        return mine_NX.view(self.tasks, self.rows, width)


@dataclass(frozen=True)
class PaddedHistory:
    """A multi-id feature that the model sees unpooled."""

    bags: Bags  # of one value or none: entry h of row n is bag n * H + h
    there_NH: Tensor  # bool

    def values(self, rows_PD: Tensor) -> History:
        """Return the feature when the embedding rows have these values."""
        # The width is named: torch could not infer it from rows whose histories are all empty.
        shape_NHD = (*self.there_NH.shape, rows_PD.shape[1])
        return History(self.bags.pool(rows_PD).view(shape_NHD), self.there_NH)


@dataclass(frozen=True)
class PaddedRows:
    """Where the rows of each task are on one side, and what their loss needs."""

    rectangles: tuple[Rectangle, ...]
    label_N: Tensor  # [N, labels] of several
    # Padding rows weigh nothing.
    share_N: Tensor  # in the mean of its task's rows: 1 / their number, or 0 for one that pads
    task_N: Tensor  # int64: the row's task, counted rectangle by rectangle
    # Of each label in its row's loss: objectives.label_weights.
    weight: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Count the rows, padding rows included."""
        return self.label_N.shape[0]

    def blocks(self, rows_NX: Tensor) -> list[Tensor]:
        """Return views of the rectangles: [tasks, rows, X] each."""
        return [rectangle.of(rows_NX) for rectangle in self.rectangles]

    def join_blocks(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return [tasks, rows, X] of each rectangle as rows [N, X]."""
        return torch.cat([block.flatten(0, 1) for block in blocks])

    def mean_TX(self, rows_NX: Tensor) -> Tensor:
        """Return the mean of each task's rows, rectangle by rectangle; 0 if it has none."""
        weighted_NX = rows_NX * self.mean_weights_N(rows_NX.dtype).unsqueeze(1)
        return torch.cat([rows.sum(dim=1) for rows in self.blocks(weighted_NX)])

    def mean_weights_N(self, dtype: torch.dtype, prior: float = 0.0) -> Tensor:
        """Return the weight of each row in the sum of the tasks' (smoothed) means, as
        RowLayout.mean_weights_N; 0 for padding."""
        share_N = self.share_N.to(dtype)
        return share_N / (1.0 + prior * share_N) if prior else share_N


@dataclass(frozen=True)
class PaddedFeatures:
    """The features of the rows of one side, or of both. A padding row has none, or any."""

    bags: Bags  # the pooled features of row n are bags n * F to (n + 1) * F
    num_features: int
    history: PaddedHistory | None  # its pooled feature is then zero
    dense_NK: Tensor
    # Which row of the batch each is, where events make inputs of it; any row for padding.
    row_N: Tensor | None = None

    def values(self, rows_PD: Tensor) -> RowFeatures:
        """Return what the model sees when the embedding rows have these values."""
        features_NFD = self.bags.pool(rows_PD).view(-1, self.num_features, rows_PD.shape[1])
        history = None if self.history is None else self.history.values(rows_PD)
        return RowFeatures(features_NFD, self.dense_NK.to(rows_PD.dtype), history)


@dataclass(frozen=True)
class PaddedTasks:
    """Support and query rows of the tasks of a batch, for the fused loop; rectangle i of either
    side holds the same tasks in the same order."""

    support: PaddedRows
    query: PaddedRows
    # One a side; or a single one of both, the support first: where no inner step moves the
    # embedding rows, and both sides' are differentiated, half as many operations do.
    features: tuple[PaddedFeatures, ...]
    common: CommonFeatures | None = None  # those left out of `features`

    @property
    def padded_share(self) -> float:
        """Return the share of padding among the rows; for tensors on the host."""
        share_N = torch.cat([self.support.share_N, self.query.share_N])
        return float((share_N == 0).float().mean())


@dataclass(frozen=True)
class FusedLayout:
    """How a batch is laid out for the fused loop."""

    pooling: Pooling  # how the model pools multi-id features
    history: int | None  # the one that it sees unpooled
    rows_per_task: bool  # every task has its own copy of the embedding rows it uses
    stacked: bool  # both sides' features stand in one
    constant_support: bool  # no gradient of what the support rows use is needed
    # Weights of the first decision layer, if common features may be split off; else 0.
    first_layer_weights: int
    num_weights: int  # of the layers that adapt
    device: str  # the kind that the loop runs on: sizes that suit a CPU drown CUDA in launches
    dtype: torch.dtype  # of the layers, and so of what weighs losses
    in_buckets: bool = False  # sizes are rounded up to few: data/buckets.py


def kind_of_device(module: nn.Module) -> str:
    """Return "cpu" for a module on a CPU, "cuda" for one on an accelerator."""
    is_cpu = next(module.parameters()).device.type == "cpu"
    return "cpu" if is_cpu else "cuda"
