"""Features that all rows of a task share, such as a user's own where tasks are users: read,
multiplied and differentiated once a task instead of once a row (RecD, Zhao et al., arXiv
2211.05239).

Where the first decision layer sees the features side by side, with a row's own inputs v and its
task's u,

    x W + b = v W_v + (u W_u + b),    x . x' + 1 = v . v' + (|u|^2 + 1)    of two rows of a task

so to the layer, u is a bias of the task's own; and in an inner step's change, which takes the inner
products of two rows (plain_update.py), the bias has |u|^2 + 1 instead of 1. Exact in any order of
differentiation.

Shape suffixes: T tasks, D embedding width, P task-row pairs, I inputs, O outputs, X all inputs side
by side"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gmeta.adaptation.layout.sparse_matrix import Bags


@dataclass(frozen=True)
class CommonFeatures:
    """Some single-id features of a batch, and the embedding rows that they read."""

    features: tuple[int, ...]
    bags: Bags  # of one value: bag t * len(features) + i

    def values_TI(self, rows_PD: Tensor) -> Tensor:
        """Return the features side by side, when the embedding rows have these values."""
        return self.bags.pool(rows_PD).view(-1, len(self.features) * rows_PD.shape[1])


class CommonInputs(NamedTuple):
    """The inputs of the first layer that all rows of a task share."""

    values_TI: Tensor
    order_X: Tensor  # the layer's columns, those of a row's own inputs first
    num_own: int  # V

    @classmethod
    def of(
        cls, features: CommonFeatures, rows_PD: Tensor, first_column: int, width: int
    ) -> "CommonInputs":
        """Return the inputs from the embedding rows, for a layer of `width` columns in which the
        features stand side by side from `first_column` on."""
        dim, device = rows_PD.shape[1], rows_PD.device
        order_X, num_own = _order_columns(features.features, first_column, dim, width, device)
        return cls(features.values_TI(rows_PD), order_X, num_own)

    def split_layer(self, weight_OX: Tensor, bias_O: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of a row's own inputs [O, I], and the bias of each task [T, O]."""
        own_X, shared_X = self.order_X.tensor_split([self.num_own])
        shared_OI = weight_OX.index_select(1, shared_X)
        return weight_OX.index_select(1, own_X), torch.addmm(bias_O, self.values_TI, shared_OI.mT)

    def shared_product_T(self, second_order: bool) -> Tensor:
        """Return |u|^2 + 1."""
        # In first order one u is a support row's, and a constant.
        values_TI = self.values_TI
        other_TI = values_TI if second_order else values_TI.detach()
        return (values_TI * other_TI).sum(dim=1) + 1.0

    def interleave(self, own_TI: Tensor, is_known_T1: Tensor) -> Tensor:
        """Return own and common inputs in the layer's order, for tasks that have rows: [T, X]."""
        both_TX = torch.cat([own_TI, self.values_TI * is_known_T1], dim=1)
        return both_TX.index_select(1, self.order_X.argsort())


@cache  # for good: a CUDA graph reads the memory of what it was captured with
def _order_columns(
    features: tuple[int, ...], first: int, dim: int, width: int, device: torch.device
) -> tuple[Tensor, int]:
    # Stable: both parts keep the layer's own order of columns.
    is_common_X = torch.zeros(width, dtype=torch.bool)
    for feature in features:
        is_common_X[first + feature * dim : first + (feature + 1) * dim] = True
    order_X = is_common_X.to(torch.int8).argsort(stable=True)
    return order_X.to(device), int(order_X.numel() - is_common_X.sum())
