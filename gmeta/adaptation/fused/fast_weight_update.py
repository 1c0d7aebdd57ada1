"""How far inner steps have moved one layer, in each rectangle of tasks: plain_update.py with its
derivatives written out, for mlp.py.

`sides` are the rectangles of the rows, and those of the support rows that the factors are of.

Shape suffixes: T tasks, N rows, S support rows, I inputs, O outputs"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from gmeta.adaptation.layout.padded_layout import Rectangle

    Rectangles = tuple[Rectangle, ...]
    Sides = tuple[Rectangles, Rectangles]

Saved = list[list[Tensor]]  # for the derivative: a product by inner step and rectangle
Grads = list[Tensor | None]


class Factors(NamedTuple):
    """One inner step's A and a G: the step subtracts A^T a G from the layer's weight."""

    activations_SI: Tensor
    scaled_grads_SO: Tensor


class Matrix(NamedTuple):
    """The change of all inner steps so far, for the tasks of a rectangle: - sum_j A_j^T a G_j."""

    weight_TIO: Tensor
    bias_T1O: Tensor


class FastWeightUpdate(NamedTuple):
    """The change of a layer by the inner steps so far, each rectangle of tasks in its own form."""

    low_rank: tuple[int, ...]  # rectangles that keep the factors of every step
    materialised: tuple[int, ...]  # rectangles that keep a matrix
    factors: tuple[Factors, ...] = ()
    matrices: tuple[Matrix, ...] = ()  # none before the first step
    bias_rate: float = 1.0  # c, by how much faster than its weights the layer's bias adapts

    @property
    def flat(self) -> list[Tensor]:
        """Return all tensors, factors first: the order of autograd's arguments and gradients."""
        return [tensor for pair in (*self.factors, *self.matrices) for tensor in pair]

    def with_step(
        self, activations_SI: Tensor, scaled_SO: Tensor, support: Rectangles
    ) -> FastWeightUpdate:
        """Return the update with one more inner step; differentiable."""
        factors, matrices = self.factors, self.matrices
        if self.low_rank:
            factors = (*factors, Factors(activations_SI, scaled_SO))
        if self.materialised:
            before = [tensor for matrix in matrices for tensor in matrix]
            mine = tuple(support[at] for at in self.materialised)
            found = _AddStep.apply(mine, self.bias_rate, activations_SI, scaled_SO, *before)
            matrices = tuple(map(Matrix, found[::2], found[1::2]))
        return self._replace(factors=factors, matrices=matrices)

    # autograd sees `with_step` alone: of each product below, the derivative is the method after it.
    def subtract(self, out_NO: Tensor, rows_NI: Tensor, sides: Sides) -> Saved:
        """Subtract the steps' change from the outputs of rows x: out -= (x A^T + c) a G."""
        for at, matrix in zip(self.materialised, self.matrices, strict=False):
            # Before the first step there are no matrices, and the loop is empty.
            out, rows = sides[0][at].of(out_NO), sides[0][at].of(rows_NI)
            out.baddbmm_(rows, matrix.weight_TIO).add_(matrix.bias_T1O)
        # The spread s = x A^T + c is kept: the derivative by a G would have to make it again.
        saved: Saved = []
        for step in self.factors:
            saved.append([])
            for at in self.low_rank:
                rectangle, support = sides[0][at], sides[1][at]
                spread = torch.bmm(rectangle.of(rows_NI), support.of(step.activations_SI).mT)
                spread.add_(self.bias_rate)
                rectangle.of(out_NO).baddbmm_(spread, support.of(step.scaled_grads_SO), alpha=-1)
                saved[-1].append(spread)
        return saved

    def subtract_backward(
        self,
        saved: Saved,
        grad_NO: Tensor,
        rows_NI: Tensor,
        rows_grad_NI: Tensor | None,
        sides: Sides,
        needs_grads: bool,
    ) -> Grads:
        """Return the gradients of `flat`, if wanted; add that of the rows to `rows_grad_NI`."""
        flat_grads: Grads = []
        for step, spreads in zip(self.factors, saved, strict=True):
            step_grads = self._empty_gradients(step) if needs_grads else None
            for at, spread in zip(self.low_rank, spreads, strict=True):
                rectangle, support = sides[0][at], sides[1][at]
                grad = rectangle.of(grad_NO)
                # Derivative of out -= s (a G) with s = x A^T + c; each product below takes the
                # minus: x gets - (g (a G)^T) A, A gets - (g (a G)^T)^T x, a G gets - s^T g.
                spread_grad = torch.bmm(grad, support.of(step.scaled_grads_SO).mT)
                if rows_grad_NI is not None:
                    activations = support.of(step.activations_SI)
                    rectangle.of(rows_grad_NI).baddbmm_(spread_grad, activations, alpha=-1)
                if step_grads is not None:
                    _write_negative_product(
                        support.of(step_grads.activations_SI), spread_grad.mT, rectangle.of(rows_NI)
                    )
                    _write_negative_product(support.of(step_grads.scaled_grads_SO), spread.mT, grad)
            flat_grads += (None, None) if step_grads is None else step_grads
        for at, matrix in zip(self.materialised, self.matrices, strict=False):
            grad = sides[0][at].of(grad_NO)
            if rows_grad_NI is not None:
                sides[0][at].of(rows_grad_NI).baddbmm_(grad, matrix.weight_TIO.mT)
            if needs_grads:
                # Of out += x D + b.
                weight_grad = torch.bmm(sides[0][at].of(rows_NI).mT, grad)
                flat_grads += weight_grad, grad.sum(dim=1, keepdim=True)
            else:
                flat_grads += None, None
        return flat_grads

    def subtract_from_gradients(
        self, below_SI: Tensor, grads_SO: Tensor, support: Rectangles
    ) -> Saved:
        """Subtract the steps' change from gradients g going back: below -= (g a G^T) A."""
        for at, matrix in zip(self.materialised, self.matrices, strict=False):
            rectangle = support[at]
            rectangle.of(below_SI).baddbmm_(rectangle.of(grads_SO), matrix.weight_TIO.mT)
        saved: Saved = []
        for step in self.factors:
            saved.append([])
            for at in self.low_rank:
                rectangle = support[at]
                # Without c: a gradient goes back through weights, never through a bias.
                spread = torch.bmm(rectangle.of(grads_SO), rectangle.of(step.scaled_grads_SO).mT)
                rectangle.of(below_SI).baddbmm_(spread, rectangle.of(step.activations_SI), alpha=-1)
                saved[-1].append(spread)
        return saved

    def subtract_from_gradients_backward(
        self,
        saved: Saved,
        below_grad_SI: Tensor,
        grads_SO: Tensor,
        grads_grad_SO: Tensor,
        support: Rectangles,
    ) -> Grads:
        """Return the gradients of `flat`; add that of g to `grads_grad_SO`."""
        flat_grads: Grads = []
        for step, spreads in zip(self.factors, saved, strict=True):
            step_grads = self._empty_gradients(step)
            for at, spread in zip(self.low_rank, spreads, strict=True):
                rectangle = support[at]
                below, scaled = rectangle.of(below_grad_SI), rectangle.of(step.scaled_grads_SO)
                # Derivative of below -= s A with s = g (a G)^T, as in subtract_backward.
                spread_grad = torch.bmm(below, rectangle.of(step.activations_SI).mT)
                rectangle.of(grads_grad_SO).baddbmm_(spread_grad, scaled, alpha=-1)
                _write_negative_product(rectangle.of(step_grads.activations_SI), spread.mT, below)
                _write_negative_product(
                    rectangle.of(step_grads.scaled_grads_SO), spread_grad.mT, rectangle.of(grads_SO)
                )
            flat_grads += step_grads
        for at, matrix in zip(self.materialised, self.matrices, strict=False):
            rectangle = support[at]
            below = rectangle.of(below_grad_SI)
            rectangle.of(grads_grad_SO).baddbmm_(below, matrix.weight_TIO)
            # The bias has no gradient here: it adds nothing to gradients that go back.
            flat_grads += torch.bmm(below.mT, rectangle.of(grads_SO)), None
        return flat_grads

    def _empty_gradients(self, step: Factors) -> Factors:
        # Rows of rectangles that keep a matrix are not written below: their gradient is 0.
        like = torch.zeros_like if self.materialised else torch.empty_like
        return Factors(like(step.activations_SI), like(step.scaled_grads_SO))


class _AddStep(torch.autograd.Function):
    """Computes D - A^T a G for the tasks of each rectangle; 0 - A^T a G in the first step."""

    @staticmethod
    def forward(
        ctx: Any,
        support: Rectangles,
        bias_rate: float,
        activations_SI: Tensor,
        scaled_SO: Tensor,
        *before: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.support, ctx.bias_rate = support, bias_rate
        ctx.save_for_backward(activations_SI, scaled_SO)
        found: list[Tensor] = []
        for number, rectangle in enumerate(support):
            activations, scaled = rectangle.of(activations_SI).mT, rectangle.of(scaled_SO)
            bias_T1O = scaled.sum(dim=1, keepdim=True)
            if before:
                weight_TIO, more_T1O = before[2 * number : 2 * number + 2]
                weight_TIO = torch.baddbmm(weight_TIO, activations, scaled, alpha=-1)
                found += weight_TIO, torch.sub(more_T1O, bias_T1O, alpha=bias_rate)
            else:
                found += torch.bmm(activations, scaled).neg_(), bias_T1O.mul_(-bias_rate)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        activations_SI, scaled_SO = ctx.saved_tensors
        count = sum(rectangle.tasks * rectangle.rows for rectangle in ctx.support)
        # Rows of rectangles that keep factors are not written here: their gradient is 0.
        like = torch.empty_like if count == len(activations_SI) else torch.zeros_like
        activations_grad, scaled_grad = like(activations_SI), like(scaled_SO)
        for rectangle, weight_TIO, bias_T1O in zip(
            ctx.support, grads[::2], grads[1::2], strict=True
        ):
            activations, scaled = rectangle.of(activations_SI), rectangle.of(scaled_SO)
            _write_negative_product(rectangle.of(activations_grad), scaled, weight_TIO.mT)
            scaled_change = torch.bmm(activations, weight_TIO).add_(bias_T1O, alpha=ctx.bias_rate)
            torch.neg(scaled_change, out=rectangle.of(scaled_grad))
        before = grads if any(ctx.needs_input_grad[4:]) else ()
        return (None, None, activations_grad, scaled_grad, *before)


def _write_negative_product(block: Tensor, left: Tensor, right: Tensor) -> None:
    # With beta = 0 the block is not read: it comes from empty_like, and may hold NaN.
    block.baddbmm_(left, right, beta=0, alpha=-1)
