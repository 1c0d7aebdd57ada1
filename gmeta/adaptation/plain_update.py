"""How far inner steps have moved a linear layer of every task, as plain differentiable products.

After k inner steps a task's weight is W - sum_j A_j^T (a G_j): A_j are the activations that entered
the layer on the support rows in step j, G_j the gradients of the support loss at the layer's
outputs, a the inner rate. Rows x of the task pass the layer, and gradients g at its outputs come
back through it, as

    x W + b - sum_j (x A_j^T + c) (a G_j)          g W^T - sum_j (g (a G_j)^T) A_j

where c a is the rate of the bias: c is 1, or algorithm.bias_rate in the last layer. This is exact
in any order of differentiation: the second order flows through A and G.

Shape suffixes: T tasks, S support rows, H longest list or task, I inputs, O outputs"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gmeta.adaptation.rates import WeightRates, scale_grads

if TYPE_CHECKING:
    from gmeta.adaptation.adaptation_plan import Path
    from gmeta.adaptation.rates import LayerRate


@dataclass(frozen=True)
class LowRankUpdate:
    """sum_j A_j^T (a G_j) as its factors: S (I + O) numbers a task."""

    activations_TSI: Tensor
    scaled_grads_TSO: Tensor
    bias_rate: float = 1.0  # c

    def with_step(self, step: LowRankUpdate) -> LowRankUpdate:
        """Return this update and one more step."""
        return LowRankUpdate(
            # The sum over steps is a product with longer factors: one GEMM for any number of steps.
            torch.cat([self.activations_TSI, step.activations_TSI], dim=1),
            torch.cat([self.scaled_grads_TSO, step.scaled_grads_TSO], dim=1),
            self.bias_rate,
        )

    def to_matrix(self) -> MaterialisedUpdate:
        """Return the same update as a matrix."""
        bias_T1O = self.scaled_grads_TSO.sum(dim=1, keepdim=True) * self.bias_rate
        return MaterialisedUpdate(self.activations_TSI.mT @ self.scaled_grads_TSO, bias_T1O)

    def output_change_THO(self, rows_THI: Tensor, has_bias: bool = True) -> Tensor:
        """Return what to subtract from the shared layer's outputs: (x A^T + c) (a G)."""
        weights_THS = rows_THI @ self.activations_TSI.mT
        return (weights_THS + self.bias_rate if has_bias else weights_THS) @ self.scaled_grads_TSO

    def gradient_change_THI(self, grads_THO: Tensor) -> Tensor:
        """Return what to subtract from the gradients behind the shared layer: (g (a G)^T) A."""
        return grads_THO @ self.scaled_grads_TSO.mT @ self.activations_TSI


@dataclass(frozen=True)
class MaterialisedUpdate:
    """sum_j a A_j^T G_j as a matrix: I O numbers a task, for any number of rows and steps."""

    weight_TIO: Tensor
    bias_T1O: Tensor

    def with_step(self, step: MaterialisedUpdate) -> MaterialisedUpdate:
        """Return this update and one more step."""
        return MaterialisedUpdate(self.weight_TIO + step.weight_TIO, self.bias_T1O + step.bias_T1O)

    def to_matrix(self) -> MaterialisedUpdate:
        """Return this update."""
        return self

    def output_change_THO(self, rows_THI: Tensor, has_bias: bool = True) -> Tensor:
        """Return what to subtract from the shared layer's outputs: x (A^T a G) + c sum_s a G_s."""
        if has_bias:
            # Bias and product in one kernel.
            return torch.baddbmm(self.bias_T1O, rows_THI, self.weight_TIO)
        return rows_THI @ self.weight_TIO

    def gradient_change_THI(self, grads_THO: Tensor) -> Tensor:
        """Return what to subtract from the gradients behind the shared layer: g (A^T a G)^T."""
        return grads_THO @ self.weight_TIO.mT


PlainUpdate = LowRankUpdate | MaterialisedUpdate


def step_update(
    path: Path, activations_TSI: Tensor, grads_TSO: Tensor, rate: LayerRate, bias_rate: float = 1.0
) -> PlainUpdate:
    """Return the update of one inner step: W_t -= a A_t^T G_t and b_t -= c a sum_s G_ts."""
    if not isinstance(rate, WeightRates):
        factors = LowRankUpdate(activations_TSI, scale_grads(grads_TSO, rate), bias_rate)
        return factors if path == "low_rank" else factors.to_matrix()
    # Meta-SGD, a rate a weight (arXiv 1707.09835): the outer product times a matrix of rates has
    # any rank, so it is a matrix whatever the path.
    weight_TIO = activations_TSI.mT @ grads_TSO * rate.weight_OI.mT
    bias_T1O = grads_TSO.sum(dim=1, keepdim=True) * bias_rate
    return MaterialisedUpdate(
        weight_TIO, bias_T1O if rate.bias_O is None else bias_T1O * rate.bias_O
    )


def add_step(before: PlainUpdate | None, step: PlainUpdate) -> PlainUpdate:
    """Return an update, if there is one, with one more step, held in the same way."""
    if isinstance(before, LowRankUpdate) and isinstance(step, LowRankUpdate):
        return before.with_step(step)
    if isinstance(before, MaterialisedUpdate) and isinstance(step, MaterialisedUpdate):
        return before.with_step(step)
    if before is not None:
        raise TypeError(f"a {type(before).__name__} is continued by a {type(step).__name__}")
    return step
