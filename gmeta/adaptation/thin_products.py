"""What a task of its own does to rows through a layer: gates, and what inner steps took from it;
none of it differentiable but `Taken.then`, with the derivatives beside it.

`sides` are the rectangles of the rows, and those of the support rows that the factors are of.

Shape suffixes: N rows of one side, T tasks, L rows of a task, I and K input widths, O output width,
S support rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from gmeta.adaptation.blocks import Rectangle

    Rectangles = tuple[Rectangle, ...]
    Sides = tuple[Rectangles, Rectangles]

Spreads = list[list[Tensor]]  # by step and rectangle
Grads = list[Tensor | None]


class Factors(NamedTuple):
    """What an inner step took from a layer: A^T G."""

    activations_SI: Tensor
    scaled_grads_SO: Tensor


class Matrix(NamedTuple):
    """What all inner steps so far add to the tasks of a rectangle: - sum_j A_j^T G_j."""

    weight_TIO: Tensor
    bias_T1O: Tensor


class Taken(NamedTuple):
    """What the inner steps so far took from a layer, each rectangle of tasks in its own way.

    A flat list of the tensors, factors first, is what autograd sees, and what their gradients are
    given in.
    """

    thin: tuple[int, ...]  # rectangles that keep the factors of every step
    full: tuple[int, ...]  # rectangles that keep a matrix
    factors: tuple[Factors, ...] = ()
    matrices: tuple[Matrix, ...] = ()  # none before the first step

    @property
    def flat(self) -> list[Tensor]:
        """Of single tensors."""
        return [tensor for pair in (*self.factors, *self.matrices) for tensor in pair]

    def then(self, activations_SI: Tensor, scaled_SO: Tensor, support: Rectangles) -> Taken:
        """With one inner step more; differentiable."""
        factors, matrices = self.factors, self.matrices
        if self.thin:
            factors = (*factors, Factors(activations_SI, scaled_SO))
        if self.full:
            before = [tensor for matrix in matrices for tensor in matrix]
            mine = tuple(support[at] for at in self.full)
            found = _Less.apply(mine, activations_SI, scaled_SO, *before)
            matrices = tuple(map(Matrix, found[::2], found[1::2]))
        return self._replace(factors=factors, matrices=matrices)

    def subtract(self, out_NO: Tensor, rows_NI: Tensor, sides: Sides) -> Spreads:
        """out -= (x A^T + 1) G of every step inside each task, in place; x A^T + 1 where the
        derivative needs it.
        """
        for at, matrix in zip(self.full, self.matrices, strict=False):
            mine = sides[0][at]
            out = mine.of(out_NO)
            add_in_task(out, mine.of(rows_NI), matrix.weight_TIO)
            out.add_(matrix.bias_T1O)
        spreads: Spreads = []
        for step in self.factors:
            of_step: list[Tensor] = []
            for at in self.thin:
                mine, support = sides[0][at], sides[1][at]
                activations = support.of(step.activations_SI)
                spread = torch.bmm(mine.of(rows_NI), activations.mT).add_(1.0)
                add_in_task(mine.of(out_NO), spread, support.of(step.scaled_grads_SO), -1)
                of_step.append(spread)
            spreads.append(of_step)
        return spreads

    def subtract_backward(
        self,
        spreads: Spreads,
        grad_NO: Tensor,
        rows_NI: Tensor,
        rows_grad_NI: Tensor | None,
        sides: Sides,
        wanted: bool,
    ) -> Grads:
        """Gradients of the tensors, if wanted; those of the rows are added to what is there."""
        found: Grads = []
        for step, spreads_of_step in zip(self.factors, spreads, strict=True):
            of_step = self._empty(step) if wanted else None
            for at, spread in zip(self.thin, spreads_of_step, strict=True):
                mine, support = sides[0][at], sides[1][at]
                grad = mine.of(grad_NO)
                of_spread = times_in_task(grad, support.of(step.scaled_grads_SO).mT)
                if rows_grad_NI is not None:
                    activations = support.of(step.activations_SI)
                    add_in_task(mine.of(rows_grad_NI), of_spread, activations, -1)
                if of_step is not None:
                    put_in_task(
                        support.of(of_step.activations_SI), of_spread.mT, mine.of(rows_NI), -1
                    )
                    put_in_task(support.of(of_step.scaled_grads_SO), spread.mT, grad, -1)
            found += (None, None) if of_step is None else of_step
        for at, matrix in zip(self.full, self.matrices, strict=False):
            grad = sides[0][at].of(grad_NO)
            if rows_grad_NI is not None:
                add_in_task(sides[0][at].of(rows_grad_NI), grad, matrix.weight_TIO.mT)
            if wanted:
                of_weight = times_in_task(sides[0][at].of(rows_NI).mT, grad)
                found += of_weight, grad.sum(dim=1, keepdim=True)
            else:
                found += None, None
        return found

    def turned(self, below_NI: Tensor, grads_NO: Tensor, support: Rectangles) -> Spreads:
        """below -= (g G^T) A of every step, in place, for gradients g of the support rows."""
        for at, matrix in zip(self.full, self.matrices, strict=False):
            mine = support[at]
            add_in_task(mine.of(below_NI), mine.of(grads_NO), matrix.weight_TIO.mT)
        spreads: Spreads = []
        for step in self.factors:
            of_step: list[Tensor] = []
            for at in self.thin:
                mine = support[at]
                spread = times_in_task(mine.of(grads_NO), mine.of(step.scaled_grads_SO).mT)
                add_in_task(mine.of(below_NI), spread, mine.of(step.activations_SI), -1)
                of_step.append(spread)
            spreads.append(of_step)
        return spreads

    def turned_backward(
        self,
        spreads: Spreads,
        below_grad_NI: Tensor,
        grads_NO: Tensor,
        grads_grad_NO: Tensor,
        support: Rectangles,
    ) -> Grads:
        """Gradients of the tensors; those of g are added to what is there."""
        found: Grads = []
        for step, spreads_of_step in zip(self.factors, spreads, strict=True):
            of_step = self._empty(step)
            for at, spread in zip(self.thin, spreads_of_step, strict=True):
                mine = support[at]
                below, scaled = mine.of(below_grad_NI), mine.of(step.scaled_grads_SO)
                of_spread = torch.bmm(below, mine.of(step.activations_SI).mT)
                add_in_task(mine.of(grads_grad_NO), of_spread, scaled, -1)
                put_in_task(mine.of(of_step.activations_SI), spread.mT, below, -1)
                put_in_task(mine.of(of_step.scaled_grads_SO), of_spread.mT, mine.of(grads_NO), -1)
            found += of_step
        for at, matrix in zip(self.full, self.matrices, strict=False):
            mine = support[at]
            below = mine.of(below_grad_NI)
            add_in_task(mine.of(grads_grad_NO), below, matrix.weight_TIO)
            found += times_in_task(below.mT, mine.of(grads_NO)), None
        return found

    def _empty(self, step: Factors) -> Factors:
        """For gradients of a step that its rectangles fill; 0 where others do not."""
        like = torch.zeros_like if self.full else torch.empty_like
        return Factors(like(step.activations_SI), like(step.scaled_grads_SO))


class _Less(torch.autograd.Function):
    """D - A^T G of the tasks of each of these rectangles; of the first step 0 - A^T G."""

    @staticmethod
    def forward(
        ctx: Any, support: Rectangles, activations_SI: Tensor, scaled_SO: Tensor, *before: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.support = support
        ctx.save_for_backward(activations_SI, scaled_SO)
        found: list[Tensor] = []
        for number, mine in enumerate(support):
            activations, scaled = mine.of(activations_SI).mT, mine.of(scaled_SO)
            bias_T1O = scaled.sum(dim=1, keepdim=True)
            if before:
                weight_TIO, more_T1O = before[2 * number : 2 * number + 2]
                weight_TIO = torch.baddbmm(weight_TIO, activations, scaled, alpha=-1)
                found += weight_TIO, more_T1O - bias_T1O
            else:
                found += times_in_task(activations, scaled).neg_(), bias_T1O.neg_()
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        activations_SI, scaled_SO = ctx.saved_tensors
        filled = sum(mine.tasks * mine.rows for mine in ctx.support) == len(scaled_SO)
        like = torch.empty_like if filled else torch.zeros_like
        of_activations, of_scaled = like(activations_SI), like(scaled_SO)
        for mine, weight_TIO, bias_T1O in zip(ctx.support, grads[::2], grads[1::2], strict=True):
            activations, scaled = mine.of(activations_SI), mine.of(scaled_SO)
            torch.neg(times_in_task(scaled, weight_TIO.mT), out=mine.of(of_activations))
            torch.neg(times_in_task(activations, weight_TIO).add_(bias_T1O), out=mine.of(of_scaled))
        before = grads if any(ctx.needs_input_grad[3:]) else ()
        return (None, of_activations, of_scaled, *before)


def times_in_task(left_TLK: Tensor, right_TKO: Tensor) -> Tensor:
    """left right inside each task: [T, L, O]. Of a single column, as the last layer has it, MKL
    takes two to six times as long as other ways do.
    """
    if left_TLK.shape[2] == 1:
        return left_TLK * right_TKO
    if right_TKO.shape[2] == 1:
        return torch.bmm(right_TKO.mT, left_TLK.mT).mT
    return torch.bmm(left_TLK, right_TKO)


def add_in_task(block_TLO: Tensor, left_TLK: Tensor, right_TKO: Tensor, sign: int = 1) -> None:
    """block += sign left right."""
    if left_TLK.shape[2] == 1:
        block_TLO.addcmul_(left_TLK, right_TKO, value=sign)
    elif right_TKO.shape[2] == 1:
        block_TLO.add_(times_in_task(left_TLK, right_TKO), alpha=sign)
    else:
        block_TLO.baddbmm_(left_TLK, right_TKO, alpha=sign)


def put_in_task(block_TLO: Tensor, left_TLK: Tensor, right_TKO: Tensor, sign: int = 1) -> None:
    """block = sign left right; what it held, maybe NaN, is not read."""
    if 1 in (left_TLK.shape[2], right_TKO.shape[2]):
        torch.mul(times_in_task(left_TLK, right_TKO), sign, out=block_TLO)
    else:
        block_TLO.baddbmm_(left_TLK, right_TKO, beta=0, alpha=sign)


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
