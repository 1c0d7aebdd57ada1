"""The losses of single rows, and their first two derivatives by the model's output.

Shape suffixes: N rows, O outputs of a layer.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def labels_taken_N(kind: str, label_N: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Where the loss is defined: `bce` takes labels from 0 to 1, the others finite numbers."""
    # NaN is neither below nor above anything.
    return (label_N >= 0) & (label_N <= 1) if kind == "bce" else np.isfinite(label_N)


def row_losses_N(kind: str, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Loss of each row: `bce` on logits, `mse` without a factor 1/2, or `huber`.

    In float32 at least. Huber's loss (1964) with its bend at an error of 1: e^2 / 2 up to there,
    then |e| - 1/2. Its minimiser lies between the mean and the median, so it serves a mean absolute
    error better.
    """
    output_N = _in_float32(output_N)
    label_N = label_N.to(output_N.dtype)
    if kind == "bce":
        return F.binary_cross_entropy_with_logits(output_N, label_N, reduction="none")
    if kind == "huber":
        return F.huber_loss(output_N, label_N, reduction="none")
    return (output_N - label_N).square()


def weighted_sum(losses_N: Tensor, weights_N: Tensor) -> Tensor:
    """Their inner product, a scalar, in the precision of the losses: `@` would be autocast's."""
    return torch.dot(losses_N, weights_N)


def row_slopes_N(kind: str, output_N: Tensor, label_N: Tensor) -> Tensor:
    """First derivative of each row's loss, differentiable once more."""
    if kind == "bce":
        return output_N.sigmoid() - label_N
    error_N = output_N - label_N.to(output_N.dtype)
    return error_N.clamp_(-1.0, 1.0) if kind == "huber" else error_N.mul_(2.0)


def row_curvatures_N(kind: str, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Second derivative of each row's loss; at Huber's bends 0."""
    if kind == "bce":
        chance_N = output_N.sigmoid()
        return chance_N.sub(chance_N.square())
    if kind == "huber":
        return ((output_N - label_N).abs() < 1.0).to(output_N.dtype)
    return torch.full_like(output_N, 2.0)


class RowLoss(NamedTuple):
    """A weighted sum of the losses of rows, of the one output [N, 1] of a last layer."""

    kind: str
    label_N: Tensor
    weight_N: Tensor  # in float32 at least

    def sum(self, output_NO: Tensor) -> Tensor:
        """Of these outputs: a scalar."""
        return torch.dot(row_losses_N(self.kind, output_NO.squeeze(1), self.label_N), self.weight_N)

    def slope_NO(self, output_NO: Tensor, times: Tensor | None = None) -> Tensor:
        """The gradient at the outputs, for a gradient of so much at the sum."""
        weight_N = self.weight_N if times is None else self.weight_N * times
        slope_N = row_slopes_N(self.kind, _in_float32(output_NO.squeeze(1)), self.label_N)
        return (slope_N * weight_N).to(output_NO.dtype).unsqueeze(1)

    def curvature_NO(self, output_NO: Tensor) -> Tensor:
        """Its derivative."""
        curvature_N = row_curvatures_N(self.kind, _in_float32(output_NO.squeeze(1)), self.label_N)
        return (curvature_N * self.weight_N).to(output_NO.dtype).unsqueeze(1)


def _in_float32(output_N: Tensor) -> Tensor:
    """At least: under autocast a loss of 8 bits would move in steps of 0.4 %."""
    return output_N.float() if output_N.dtype in HALVES else output_N
