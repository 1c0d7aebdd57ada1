"""Features that all rows of a task share, as a user's own where tasks are users: read, multiplied
and differentiated once a task in place of once a row.

Where the first decision layer sees the features side by side, of a row's own v and its task's u,

    x W + b = v W_v + (u W_u + b),    x . x' + 1 = v . v' + (|u|^2 + 1)    of two rows of a task

so to the layer, u is a bias that each task has for itself; and of an inner step's change, which
asks for what two rows have in common (linear.py), the bias has |u|^2 + 1 in place of 1. Exact in
any order of differentiation. Recommendation models save most of their work so where requests share
a user (RecD, Zhao et al., arXiv 2211.05239); episodes always do.

Shape suffixes: T tasks, U inputs that the rows of a task share, V other inputs of a row, X all of
them, N rows, O output width.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gmeta.adaptation.bags import Bags


@dataclass(frozen=True)
class CommonFeatures:
    """Some single-id features of a batch, and where their embeddings are found."""

    features: tuple[int, ...]
    bags: Bags  # of one value: bag t * len(features) + i
    of_rows: tuple[Bags, ...]  # of each block of rows, the row's task

    def values_TU(self, rows_PD: Tensor) -> Tensor:
        """Side by side, when the embedding rows have these values."""
        pooled = self.bags.pool(rows_PD)
        return pooled.view(-1, len(self.features) * rows_PD.shape[1])

    def columns(self, first: int, dim: int, weight_OX: Tensor) -> "Columns":
        """Of the first layer, where embeddings so wide stand side by side from column `first`."""
        return _columns(self.features, first, dim, weight_OX.shape[1], weight_OX.device)

    def to(self, device: torch.device) -> "CommonFeatures":
        """Copy to a device."""
        of_rows = tuple(bags.to(device) for bags in self.of_rows)
        return CommonFeatures(self.features, self.bags.to(device), of_rows)


class Columns(NamedTuple):
    """The first layer's columns, those of a row's own inputs first."""

    order_X: Tensor
    inverse_X: Tensor
    num_own: int  # V


class CommonInputs(NamedTuple):
    """What the rows of a task share of the first layer's inputs."""

    features: CommonFeatures
    columns: Columns
    values_TU: Tensor

    def beside(self, own_TV: Tensor, values_TU: Tensor) -> Tensor:
        """Both in the order of the layer's columns: [T, X]."""
        return torch.cat([own_TV, values_TU], dim=1).index_select(1, self.columns.inverse_X)


class FirstLayer(NamedTuple):
    """The first layer as a row's own inputs see it."""

    weight_OV: Tensor
    bias_TO: Tensor
    common_T: Tensor  # |u|^2 + 1


def first_layer(
    weight_OX: Tensor, bias_O: Tensor, inputs: CommonInputs, second_order: bool
) -> FirstLayer:
    """Split as above. Without `second_order` one of the two u in |u|^2 is a support row's, and a
    constant.
    """
    parts: tuple[Tensor, Tensor, Tensor] = _Split.apply(
        weight_OX, bias_O, inputs.values_TU.to(weight_OX.dtype), inputs.columns, second_order
    )
    return FirstLayer(*parts)


class _Split(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight_OX: Tensor,
        bias_O: Tensor,
        values_TU: Tensor,
        columns: Columns,
        second_order: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ordered_OX = weight_OX.index_select(1, columns.order_X)
        own_OV, shared_OU = ordered_OX.tensor_split([columns.num_own], dim=1)
        ctx.columns, ctx.second_order = columns, second_order
        ctx.save_for_backward(values_TU, shared_OU)
        ctx.set_materialize_grads(False)
        bias_TO = torch.addmm(bias_O, values_TU, shared_OU.mT)
        return own_OV.contiguous(), bias_TO, values_TU.square().sum(dim=1).add_(1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own_OV, bias_TO, common_T = grads
        values_TU, shared_OU = ctx.saved_tensors
        of_values_TU = bias_TO @ shared_OU
        if common_T is not None:  # the layer adapts
            times = 2.0 if ctx.second_order else 1.0
            of_values_TU.addcmul_(common_T.unsqueeze(1), values_TU, value=times)
        of_weight_OX = torch.cat([own_OV, bias_TO.mT @ values_TU], dim=1)
        of_weight_OX = of_weight_OX.index_select(1, ctx.columns.inverse_X)
        return of_weight_OX, bias_TO.sum(dim=0), of_values_TU, None, None


@lru_cache(maxsize=64)
def _columns(
    features: tuple[int, ...], first: int, dim: int, width: int, device: torch.device
) -> Columns:
    is_common_X = torch.zeros(width, dtype=torch.bool)
    for feature in features:
        is_common_X[first + feature * dim : first + (feature + 1) * dim] = True
    order_X = is_common_X.to(torch.int8).argsort(stable=True)
    inverse_X = order_X.argsort()
    num_own = int(order_X.numel() - is_common_X.sum())
    return Columns(order_X.to(device), inverse_X.to(device), num_own)
