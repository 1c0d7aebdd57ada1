"""The losses of single rows by one output, and their first derivatives; objectives.py has several
labels.

Shape suffix: N rows"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from gmeta.config.losses import CustomLoss

HALVES = (torch.bfloat16, torch.float16)
RANKING = ("softmax", "pairwise")
ANY_NUMBER = ("mse", "huber", "mae")  # labels without a scale of their own


def defined_labels_N(kind: str, label_N: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Return where the loss is defined: `bce` on [0, 1], `softmax` from 0 on, others if finite."""
    # NaN is neither below nor above anything.
    if kind == "bce":
        return (label_N >= 0) & (label_N <= 1)
    return np.isfinite(label_N) & (label_N >= 0) if kind == "softmax" else np.isfinite(label_N)


class LossFunction(NamedTuple):
    """The loss of the rows, in the inner and in the outer loop.

    `bce` on logits; with the error e, `mse`: e^2, without a factor 1/2; `mae`: |e|; `huber`,
    Huber's loss (1964): e^2 / 2 up to an error of d = `huber_delta`, then d (|e| - d / 2). The
    minimiser of `mae` is the median, that of `huber` lies between it and the mean. `softmax` and
    `pairwise`: ranking.py. Of a package's `own` loss `kind` only says what a model predicts."""

    kind: str
    huber_delta: float = 1.0
    # Of bce: rows are shown as of label 0 at first, and once more as of label 1 when it comes.
    comes_late: bool = False
    own: CustomLoss | None = None

    @property
    def ranks(self) -> bool:
        """Tell whether it is a loss of a task's rows together: outputs then only give an order."""
        return self.kind in RANKING


def row_losses_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return the loss of each row, in float32 at least."""
    output_N = in_float32(output_N)
    label_N = label_N.to(output_N.dtype)
    if loss.comes_late:
        once_N = row_losses_N(loss._replace(comes_late=False), output_N, label_N)
        return once_N * late_weights_N(output_N, label_N)
    if loss.own is not None:
        return loss.own.call(loss.own.function, output_N, label_N)
    if loss.kind == "bce":
        return F.binary_cross_entropy_with_logits(output_N, label_N, reduction="none")
    if loss.kind == "huber":
        return F.huber_loss(output_N, label_N, reduction="none", delta=loss.huber_delta)
    error_N = output_N - label_N
    return error_N.abs() if loss.kind == "mae" else error_N.square()


def weighted_sum(losses_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the inner product, a scalar."""
    # In the precision of the losses, which `@` would lower to autocast's.
    return torch.dot(losses_N, weights_N)


def row_grads_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return the first derivative of each row's loss, differentiable once more."""
    if loss.own is not None:
        return _slopes_N(loss, output_N, label_N)
    if loss.comes_late:
        once_N = row_grads_N(loss._replace(comes_late=False), output_N, label_N)
        return once_N * late_weights_N(output_N, label_N)
    if loss.kind == "bce":
        return output_N.sigmoid() - label_N
    error_N = output_N - label_N.to(output_N.dtype)
    if loss.kind == "huber":
        return error_N.clamp(-loss.huber_delta, loss.huber_delta)
    return error_N.sign() if loss.kind == "mae" else error_N * 2.0


def _slopes_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    is_graphed = torch.is_grad_enabled() and output_N.requires_grad
    with torch.enable_grad():
        seen_N = output_N if is_graphed else output_N.detach().requires_grad_()
        # A row's loss is its own: the gradient of their sum holds each one's derivative.
        total = row_losses_N(loss, seen_N, label_N).sum()
        (slope_N,) = torch.autograd.grad(total, seen_N, create_graph=is_graphed)
    return slope_N


def curvatures_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return the second derivative of each row's `own` loss, at least 0."""
    assert loss.own is not None
    if loss.own.curvature is not None:
        return loss.own.call(loss.own.curvature, output_N, label_N)
    with torch.enable_grad():
        seen_N = output_N if output_N.requires_grad else output_N.detach().requires_grad_()
        slope_N = _slopes_N(loss, seen_N, label_N)
        if not slope_N.requires_grad:  # a loss of straight lines
            return torch.zeros_like(output_N)
        (curve_N,) = torch.autograd.grad(
            slope_N.sum(), seen_N, create_graph=True, materialize_grads=True
        )
    # Below 0 a solved step would lead uphill.
    return curve_N.clamp(min=0.0)


def late_weights_N(output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return the fake-negative weights of rows, by which each row once as of label 0 and those of
    label 1 once more teach as if each were shown once, as what it is: 1 + p and (1 - p) (1 + p),
    with the prediction p (Ktena et al., "Addressing Delayed Feedback for Continuous Training with
    Neural Networks in CTR prediction", RecSys 2019, arXiv 1907.06558)."""
    p_N = output_N.detach().sigmoid()
    return (1.0 + p_N) * (1.0 - (1.0 - label_N) * p_N)


def errors_N(loss: LossFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
    """Return label minus prediction: a probability for `bce`."""
    output_N = in_float32(output_N)
    predicted_N = output_N.sigmoid() if loss.kind == "bce" else output_N
    return label_N.to(output_N.dtype) - predicted_N


def in_float32(output_N: Tensor) -> Tensor:
    """Return outputs in float32 at least."""
    # In autocast's 8 bits a loss would move by steps of 0.4 %.
    return output_N.float() if output_N.dtype in HALVES else output_N
