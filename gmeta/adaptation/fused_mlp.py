"""An MLP adapted to many tasks at once, and the gradients at its layers' outputs: two operations
with their derivatives written out.

Let h_0 be the inputs and h_l = relu(z_l) what layer l gives. As in linear.py, a task's layer is the
shared one less the factors (A_j, G_j) of its inner steps j, with the rates inside G_j:

    z_l = h_{l-1} W_l + b_l - sum_j (h_{l-1} A_jl^T + 1) G_jl                          (outputs)

The gradients g_l of a loss at the outputs z_l follow from that at the last one,

    g_{l-1} = m_{l-1} * (g_l W_l^T - sum_j (g_l G_jl^T) A_jl),   m_l = [h_l > 0], m_0 = 1    (grads)

where a gated layer (models/gated.py) has diag(g_t) h W + g_t b in place of h W + b, and a gradient
times g_t in the product with W_l^T. An inner step is one more pair of factors, (h_{l-1}, rate *
g_l). Both operations are a product with a shared matrix less thin products inside each task, so
both share the code of that and of its derivative. autograd would find the same derivatives in five
times as many operations, most of which allocate. ReLU has no second derivative: `grads` passes none
on to h.

Shape suffixes: N rows of one side, I input width, O output width, S support rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.adaptation.thin_products import (
    Factors,
    gate_grad,
    gated_rows,
    subtract,
    subtract_backward,
)
from models.products import over_rows, times

if TYPE_CHECKING:
    from gmeta.adaptation.thin_products import Rectangles


@dataclass(frozen=True)
class AdaptedMlp:
    """Layers, and for each the factors of the inner steps so far: none where it does not adapt.

    A layer without a gate has None for it; `support` are the rectangles that the factors' rows
    stand in.
    """

    weights_OI: Sequence[Tensor]
    biases_O: Sequence[Tensor]
    gates_TO: Sequence[Tensor | None]
    factors: Sequence[Sequence[Factors]]
    support: Rectangles

    def outputs(self, inputs_NI: Tensor, rows: Rectangles) -> tuple[Tensor, ...]:
        """h_1, ..., h_{L-1} and z_L of rows in these rectangles."""
        plan, tensors = self._flat(rows)
        outputs: tuple[Tensor, ...] = _Outputs.apply(plan, inputs_NI.contiguous(), *tensors)
        return outputs

    def grads(self, last: Tensor, hidden: Sequence[Tensor], lowest: int = 0) -> tuple[Tensor, ...]:
        """g_lowest, ..., g_L of the support rows, from g_L and h_1, ..., h_{L-1}."""
        if lowest == len(self.factors):
            return (last,)
        plan, tensors = self._flat(self.support, lowest)
        below: tuple[Tensor, ...] = _Grads.apply(plan, last.contiguous(), *hidden, *tensors)
        return (*below, last)

    def _flat(self, rows: Rectangles, lowest: int = 0) -> tuple[_Plan, list[Tensor | None]]:
        gated = tuple(at for at, gate in enumerate(self.gates_TO) if gate is not None)
        plan = _Plan(tuple(map(len, self.factors)), gated, rows, self.support, lowest)
        factors = [list(layer) for layer in self.factors]
        parts = list(self.weights_OI), list(self.biases_O), list(self.gates_TO), factors
        return plan, plan.packed(_Unpacked(*parts))


class _Unpacked(NamedTuple):
    """Tensors, or what is known of their gradients, by layer."""

    weights: list[Any]
    biases: list[Any]
    gates: list[Any]  # None: the layer has none
    factors: list[list[Any]]  # pairs by inner step


class _Plan(NamedTuple):
    """What is what in the flat list of tensors that an autograd Function takes."""

    steps: tuple[int, ...]  # of each layer
    gated: tuple[int, ...]  # layers with a gate
    rows: Rectangles
    support: Rectangles
    lowest: int  # of the g that are asked for

    @property
    def sides(self) -> tuple[Rectangles, Rectangles]:
        """Of the rows, and of the support rows in the factors."""
        return self.rows, self.support

    def unpacked(self, tensors: Sequence[Tensor]) -> _Unpacked:
        """The tensors by layer."""
        layers, rest = len(self.steps), iter(tensors)
        weights, biases = ([next(rest) for _ in range(layers)] for _ in range(2))
        gates = [next(rest) if at in self.gated else None for at in range(layers)]
        factors = [[Factors(next(rest), next(rest)) for _ in range(k)] for k in self.steps]
        return _Unpacked(weights, biases, gates, factors)

    def packed(self, found: _Unpacked) -> list[Tensor | None]:
        """Inverse of `unpacked`."""
        gates = [found.gates[at] for at in self.gated]
        factors = [tensor for layer in found.factors for step in layer for tensor in step]
        return [*found.weights, *found.biases, *gates, *factors]

    def nothing(self) -> _Unpacked:
        """No gradient known yet."""
        layers = len(self.steps)
        factors = [[(None, None)] * k for k in self.steps]
        return _Unpacked([None] * layers, [None] * layers, [None] * layers, factors)


def _below_autograd(run: Callable[..., Any]) -> Any:
    """Its many small calls are a tenth shorter so."""

    @wraps(run)
    def inside(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return run(*args)

    return inside


def _derivative(run: Callable[..., Any]) -> Any:
    """The same for what is no more differentiated."""
    return once_differentiable(_below_autograd(run))


class _Outputs(torch.autograd.Function):
    @staticmethod
    @_below_autograd
    def forward(ctx: Any, plan: _Plan, inputs_NI: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases, gates, factors = plan.unpacked(tensors)
        seen: list[Tensor] = [inputs_NI]
        ungated: list[Tensor] = []
        spreads: list[list[list[Tensor]]] = []
        for at, (weight_OI, bias_O, gate_TO) in enumerate(zip(weights, biases, gates, strict=True)):
            if at:
                seen[-1].relu_()
            out_NO = times(seen[-1], weight_OI.mT, bias_O)
            if gate_TO is not None:
                ungated.append(out_NO)
                out_NO = gated_rows(out_NO, gate_TO, plan.rows)
            spreads.append(
                [subtract(out_NO, seen[-1], step, plan.sides, 1.0) for step in factors[at]]
            )
            seen.append(out_NO)
        ctx.plan, ctx.spreads = plan, spreads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*seen[:-1], *ungated, *tensors)
        return tuple(seen[1:])

    @staticmethod
    @_derivative
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, layers = ctx.plan, len(ctx.plan.steps)
        seen, rest = ctx.saved_tensors[:layers], ctx.saved_tensors[layers:]
        ungated, tensors = rest[: len(plan.gated)], rest[len(plan.gated) :]
        weights, _, gates, factors = plan.unpacked(tensors)
        found = plan.nothing()
        wants_inputs = ctx.needs_input_grad[1]
        wants_factors = any(ctx.needs_input_grad[2 + 2 * layers + len(plan.gated) :])
        above = _contiguous(above)
        grad = above[-1]
        for at in reversed(range(layers)):
            before = None
            if grad is not None:
                shared, gate_TO = grad, gates[at]
                if gate_TO is not None:
                    base_NO = ungated[plan.gated.index(at)]
                    found.gates[at] = gate_grad(grad, base_NO, plan.rows)
                    shared = gated_rows(grad, gate_TO, plan.rows)
                found.weights[at] = over_rows(shared, seen[at])
                found.biases[at] = shared.sum(dim=0)
                before = times(shared, weights[at]) if at or wants_inputs else None
                found.factors[at] = [
                    subtract_backward(grad, seen[at], before, *pair, plan.sides, wants_factors)
                    for pair in zip(factors[at], ctx.spreads[at], strict=True)
                ]
            if at:
                before = _sum(before, above[at - 1])
                grad = None if before is None else _where_active(before, seen[at])
        return (None, before, *plan.packed(found))


class _Grads(torch.autograd.Function):
    @staticmethod
    @_below_autograd
    def forward(ctx: Any, plan: _Plan, last: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        hidden = len(plan.steps) - 1
        weights, _, gates, factors = plan.unpacked(tensors[hidden:])
        grads: list[Tensor] = [last]
        spreads: list[list[list[Tensor]]] = []
        for at in reversed(range(plan.lowest, len(weights))):
            gate_TO = gates[at]
            shared = grads[0] if gate_TO is None else gated_rows(grads[0], gate_TO, plan.rows)
            below_NI = times(shared, weights[at])
            # The roles of the factors are exchanged, and there is no bias.
            turned = [Factors(*reversed(step)) for step in factors[at]]
            spreads.insert(
                0, [subtract(below_NI, grads[0], step, plan.sides, 0.0) for step in turned]
            )
            grads.insert(0, _where_active(below_NI, tensors[at - 1]) if at else below_NI)
        ctx.plan, ctx.spreads = plan, spreads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *grads)
        return tuple(grads[:-1])

    @staticmethod
    @_derivative
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, layers = ctx.plan, len(ctx.plan.steps)
        saved, lowest = ctx.saved_tensors, plan.lowest
        tensors, grads = saved[: lowest - layers - 1], saved[lowest - layers - 1 :]
        weights, _, gates, factors = plan.unpacked(tensors[layers - 1 :])
        found = plan.nothing()
        above = _contiguous(above)
        carried: Tensor | None = None
        for at in range(lowest, layers):
            below_NI = _sum(carried, above[at - lowest])
            if below_NI is None:
                continue
            if at:
                below_NI = _where_active(below_NI, tensors[at - 1])
            grad, gate_TO = grads[at - lowest + 1], gates[at]
            carried, shared = times(below_NI, weights[at].mT), grad
            if gate_TO is not None:
                found.gates[at] = gate_grad(grad, carried, plan.rows)
                carried = gated_rows(carried, gate_TO, plan.rows)
                shared = gated_rows(grad, gate_TO, plan.rows)
            found.weights[at] = over_rows(shared, below_NI)
            for number, step in enumerate(factors[at]):
                of_grads, of_activations = subtract_backward(
                    below_NI,
                    grad,
                    carried,
                    Factors(*reversed(step)),
                    ctx.spreads[at - lowest][number],
                    plan.sides,
                    True,
                )
                found.factors[at][number] = (of_activations, of_grads)
        return (None, carried, *[None] * (layers - 1), *plan.packed(found))


def _contiguous(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """As rectangles are cut from them."""
    return tuple(grad if grad is None else grad.contiguous() for grad in grads)


def _where_active(grad: Tensor, hidden: Tensor) -> Tensor:
    """The gradient before a ReLU from that after it."""
    before: Tensor = torch.ops.aten.threshold_backward(grad, hidden, 0)
    return before


def _sum(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of what there is, in place of the first."""
    if own is None or other is None:
        return other if own is None else own
    return own.add_(other)
