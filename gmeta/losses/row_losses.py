"""The losses of single rows by one output, and their first derivatives by it. Several labels are
objectives.py's.

Shape suffix: N rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
RANKING = ("softmax", "pairwise")


def defined_labels_N(kind: str, label_N: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Return where the loss is defined: for `bce` from 0 to 1, for `softmax` from 0 on, else
    wherever it is finite."""
    # NaN is neither below nor above anything.
    if kind == "bce":
        return (label_N >= 0) & (label_N <= 1)
    return np.isfinite(label_N) & (label_N >= 0) if kind == "softmax" else np.isfinite(label_N)


class LossFunction(NamedTuple):
    """Which loss the rows have, of the inner and of the outer loop.

    `bce` on logits; with the error e, `mse`: e^2, without a factor 1/2; `mae`: |e|; `huber`,
    Huber's loss (1964): e^2 / 2 up to an error of d = `huber_delta`, then d (|e| - d / 2). The
    minimiser of `mae` is the median, that of `huber` lies between it and the mean. `softmax` and
    `pairwise` are of a task's rows together: ranking.py."""

    kind: str
    huber_delta: float = 1.0

    @property
    def ranks(self) -> bool:
        """Tell whether it is a loss of a task's rows together, whose outputs only give an order."""
        return self.kind in RANKING


def row_losses_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return the loss of each row, in float32 at least."""
    output_N = in_float32(output_N)
    label_N = label_N.to(output_N.dtype)
    if loss.kind == "bce":
        return F.binary_cross_entropy_with_logits(output_N, label_N, reduction="none")
    if loss.kind == "huber":
        return F.huber_loss(output_N, label_N, reduction="none", delta=loss.huber_delta)
    error_N = output_N - label_N
    return error_N.abs() if loss.kind == "mae" else error_N.square()


def weighted_sum(losses_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return their inner product, a scalar, in the precision of the losses, not autocast's as with
    `@`."""
    return torch.dot(losses_N, weights_N)


def row_grads_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return the first derivative of each row's loss by its output, differentiable once more."""
    if loss.kind == "bce":
        return output_N.sigmoid() - label_N
    error_N = output_N - label_N.to(output_N.dtype)
    if loss.kind == "huber":
        return error_N.clamp(-loss.huber_delta, loss.huber_delta)
    return error_N.sign() if loss.kind == "mae" else error_N * 2.0


def errors_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return how far each label is above its prediction: a probability for `bce`."""
    output_N = in_float32(output_N)
    predicted_N = output_N.sigmoid() if loss.kind == "bce" else output_N
    return label_N.to(output_N.dtype) - predicted_N


def in_float32(output_N: Tensor) -> Tensor:
    """Return outputs in float32 at least: autocast's 8 bits would move a loss by steps of 0.4 %."""
    return output_N.float() if output_N.dtype in HALVES else output_N
