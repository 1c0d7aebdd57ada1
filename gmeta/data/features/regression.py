"""The linear or logistic regression of a label on a row's dense inputs: what a model starts as.

With inputs and labels (of bce aside) less their means, in units of their deviations, its weights w
and bias b are least in

    sum over rows of loss(x w + b, y) + PENALTY / 2 (|w|^2 + b^2)

where b counts from the mean label, of bce its log-odds.

Shape suffixes: T tasks, N rows, K dense columns, X all inputs side by side"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gmeta.data.sums import log_odds
from gmeta.losses.objectives import known_labels, known_weights
from gmeta.losses.row_losses import LossFunction, row_grads_N, row_losses_N
from metaio.ragged import find_firsts
from metaio.read.batch import TaskBatch

PENALTY = 1.0
# Newton's method needs some five; the reweighted least squares of mae some thirty.
MOST_ROUNDS = 40
# mae is taken for huber with this delta, in deviations: nearer rows would count without limit.
_NEAR = 0.01


class Regression(NamedTuple):
    """A row's output as a sum: bias + inputs * weights."""

    weight_K: Tensor
    bias: float
    num_rows: int  # that it was fitted to


def select_query_rows(batch: TaskBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense inputs, labels and weights of a batch's query rows; 0 of an unknown label."""
    rows_T = np.diff(batch.row_offsets_T1.numpy())
    is_query_N = torch.from_numpy(~find_firsts(rows_T, batch.support_lengths_T.numpy()))
    weight_N = known_weights(batch.label_N, batch.weight_N if batch.weight_N.numel() else None)
    label_N = known_labels(batch.label_N, weight_N)
    return batch.dense_NK[is_query_N], label_N[is_query_N], weight_N[is_query_N]


def fit_regression(
    loss: LossFunction, input_NK: Tensor, label_N: Tensor, weight_N: Tensor
) -> Regression:
    """Return the regression over rows in float64, each counted by its weight."""
    is_bce, total = loss.kind == "bce", weight_N.sum().clamp(min=1e-12)
    mean_K, mean = weight_N @ input_NK / total, float(weight_N @ label_N / total)
    deviation_K = (weight_N @ (input_NK - mean_K).square() / total).sqrt()
    # A column that does not vary gets no weight; it differs from its mean by rounding. Around 0
    # that is of statistics, which are of order 1: no task of training may have an item twice.
    varies_K = deviation_K > 1e-6 * mean_K.abs().clamp(min=1.0)
    scaled_NK = torch.where(varies_K, (input_NK - mean_K) / deviation_K, 0.0)
    scale = 1.0 if is_bce else float((weight_N @ (label_N - mean).square() / total).sqrt()) or 1.0
    base = float(log_odds(mean)) if is_bce else 0.0
    loss = LossFunction(loss.kind, loss.huber_delta / scale)
    if loss.kind == "mae":
        loss, weight_N = LossFunction("huber", _NEAR), weight_N / _NEAR
    input_NX = torch.cat([scaled_NK, torch.ones_like(label_N)[:, None]], dim=1)
    scaled_N = label_N if is_bce else (label_N - mean) / scale
    found_X = _minimise(input_NX, scaled_N, weight_N, loss, base)
    weight_K = torch.where(varies_K, found_X[:-1] / deviation_K, 0.0) * scale
    bias = (base if is_bce else mean) + float(found_X[-1]) * scale - float(mean_K @ weight_K)
    return Regression(weight_K, bias, len(label_N))


def _minimise(
    input_NX: Tensor, label_N: Tensor, weight_N: Tensor, loss: LossFunction, base: float
) -> Tensor:
    def objective(at_X: Tensor) -> float:
        losses_N = row_losses_N(loss, base + input_NX @ at_X, label_N)
        return float(weight_N @ losses_N + PENALTY / 2 * at_X.square().sum())

    at_X = input_NX.new_zeros(input_NX.shape[1])
    for _ in range(MOST_ROUNDS):
        output_N = base + input_NX @ at_X
        grad_N = row_grads_N(loss, output_N, label_N)
        if loss.kind == "bce":
            curve_N = output_N.sigmoid() * output_N.neg().sigmoid()
        else:
            # Of the parabola with this gradient whose vertex is the label: it lies above the loss.
            error_N = output_N - label_N
            error_N = torch.where(error_N.abs() > 1e-9, error_N, 1e-9)
            curve_N = row_grads_N(loss, error_N, torch.zeros_like(label_N)) / error_N
        hessian_XX = input_NX.T @ (input_NX * (weight_N * curve_N)[:, None])
        hessian_XX.diagonal().add_(PENALTY)
        step_X = torch.linalg.solve(hessian_XX, input_NX.T @ (weight_N * grad_N) + PENALTY * at_X)
        # Newton's steps on clicks may go too far.
        reached = objective(at_X)
        while objective(at_X - step_X) > reached and step_X.abs().max() > 1e-12:
            step_X = step_X / 2
        at_X = at_X - step_X
        if step_X.abs().max() < 1e-9:
            break
    return at_X
