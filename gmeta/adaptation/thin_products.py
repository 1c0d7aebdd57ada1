"""What a task of its own does to rows through a layer: gates, and the factors of inner steps; none
of it differentiable, with the derivatives beside it.

`sides` are the rectangles of the rows, and those of the support rows that the factors are of.

Shape suffixes: N rows of one side, T tasks, I input width, O output width, S support rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gmeta.adaptation.blocks import Rectangle

    Rectangles = tuple[Rectangle, ...]


class Factors(NamedTuple):
    """What an inner step took from a layer: A^T G."""

    activations_SI: Tensor
    scaled_grads_SO: Tensor


def gated_rows(rows_NO: Tensor, gate_TO: Tensor, rectangles: Rectangles) -> Tensor:
    """Each row times its task's gate."""
    gated_NO, task = torch.empty_like(rows_NO), 0
    for mine in rectangles:
        gates = gate_TO[task : task + mine.tasks].unsqueeze(1)
        torch.mul(mine.of(rows_NO), gates, out=mine.of(gated_NO))
        task += mine.tasks
    return gated_NO


def gate_grad(grad_NO: Tensor, rows_NO: Tensor, rectangles: Rectangles) -> Tensor:
    """The gate's gradient, from that of the gated rows: [T, O]."""
    return torch.cat([(mine.of(grad_NO) * mine.of(rows_NO)).sum(dim=1) for mine in rectangles])


def subtract(
    out_NO: Tensor,
    rows_NI: Tensor,
    factors: Factors,
    sides: tuple[Rectangles, Rectangles],
    shift: float,
) -> list[Tensor]:
    """out -= (x A^T + shift) G inside each task, in place; x A^T + shift, for the derivative."""
    spreads = []
    for mine, support in zip(*sides, strict=True):
        spread = mine.of(rows_NI) @ support.of(factors.activations_SI).mT
        if shift:
            spread += shift
        mine.of(out_NO).baddbmm_(spread, support.of(factors.scaled_grads_SO), alpha=-1)
        spreads.append(spread)
    return spreads


def subtract_backward(
    grad_NO: Tensor,
    rows_NI: Tensor,
    rows_grad_NI: Tensor | None,
    factors: Factors,
    spreads: list[Tensor],
    sides: tuple[Rectangles, Rectangles],
    wants_factors: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the factors; those of the rows are added to what is there, in place."""
    of_activations = torch.empty_like(factors.activations_SI) if wants_factors else None
    of_grads = torch.empty_like(factors.scaled_grads_SO) if wants_factors else None
    for mine, support, spread in zip(*sides, spreads, strict=True):
        grad = mine.of(grad_NO)
        of_spread = grad @ support.of(factors.scaled_grads_SO).mT
        if rows_grad_NI is not None:
            activations = support.of(factors.activations_SI)
            mine.of(rows_grad_NI).baddbmm_(of_spread, activations, alpha=-1)
        if of_activations is not None and of_grads is not None:
            rows = mine.of(rows_NI)
            support.of(of_activations).baddbmm_(of_spread.mT, rows, beta=0, alpha=-1)
            support.of(of_grads).baddbmm_(spread.mT, grad, beta=0, alpha=-1)
    return of_activations, of_grads
