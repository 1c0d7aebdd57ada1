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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.adaptation.blocks import Rectangle
from models.products import over_rows, times

Rectangles = tuple[Rectangle, ...]


class Factors(NamedTuple):
    """What an inner step took from a layer: A^T G."""

    activations_SI: Tensor
    scaled_grads_SO: Tensor


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

    def _flat(self, rows: Rectangles, lowest: int = 0) -> "tuple[_Plan, list[Tensor | None]]":
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


class _Outputs(torch.autograd.Function):
    @staticmethod
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
                out_NO = _gated(out_NO, gate_TO, plan.rows)
            spreads.append([_subtract(out_NO, seen[-1], step, plan, 1.0) for step in factors[at]])
            seen.append(out_NO)
        ctx.plan, ctx.spreads = plan, spreads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*seen[:-1], *ungated, *tensors)
        return tuple(seen[1:])

    @staticmethod
    @once_differentiable
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
                    found.gates[at] = _of_gate(grad, base_NO, plan.rows)
                    shared = _gated(grad, gate_TO, plan.rows)
                found.weights[at] = over_rows(shared, seen[at])
                found.biases[at] = shared.sum(dim=0)
                before = times(shared, weights[at]) if at or wants_inputs else None
                found.factors[at] = [
                    _subtract_backward(grad, seen[at], before, *pair, plan, wants_factors)
                    for pair in zip(factors[at], ctx.spreads[at], strict=True)
                ]
            if at:
                before = _sum(before, above[at - 1])
                grad = None if before is None else _where_active(before, seen[at])
        return (None, before, *plan.packed(found))


class _Grads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, last: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        hidden = len(plan.steps) - 1
        weights, _, gates, factors = plan.unpacked(tensors[hidden:])
        grads: list[Tensor] = [last]
        spreads: list[list[list[Tensor]]] = []
        for at in reversed(range(plan.lowest, len(weights))):
            gate_TO = gates[at]
            shared = grads[0] if gate_TO is None else _gated(grads[0], gate_TO, plan.rows)
            below_NI = times(shared, weights[at])
            # The roles of the factors are exchanged, and there is no bias.
            turned = [Factors(*reversed(step)) for step in factors[at]]
            spreads.insert(0, [_subtract(below_NI, grads[0], step, plan, 0.0) for step in turned])
            grads.insert(0, _where_active(below_NI, tensors[at - 1]) if at else below_NI)
        ctx.plan, ctx.spreads = plan, spreads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *grads)
        return tuple(grads[:-1])

    @staticmethod
    @once_differentiable
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
                found.gates[at] = _of_gate(grad, carried, plan.rows)
                carried = _gated(carried, gate_TO, plan.rows)
                shared = _gated(grad, gate_TO, plan.rows)
            found.weights[at] = over_rows(shared, below_NI)
            for number, step in enumerate(factors[at]):
                of_grads, of_activations = _subtract_backward(
                    below_NI,
                    grad,
                    carried,
                    Factors(*reversed(step)),
                    ctx.spreads[at - lowest][number],
                    plan,
                    True,
                )
                found.factors[at][number] = (of_activations, of_grads)
        return (None, carried, *[None] * (layers - 1), *plan.packed(found))


def _gated(rows_NO: Tensor, gate_TO: Tensor, rectangles: Rectangles) -> Tensor:
    """Each row times its task's gate."""
    gated_NO, task = torch.empty_like(rows_NO), 0
    for mine in rectangles:
        gates = gate_TO[task : task + mine.tasks].unsqueeze(1)
        torch.mul(mine.of(rows_NO), gates, out=mine.of(gated_NO))
        task += mine.tasks
    return gated_NO


def _of_gate(grad_NO: Tensor, rows_NO: Tensor, rectangles: Rectangles) -> Tensor:
    """The gate's gradient, from that of the gated rows: [T, O]."""
    return torch.cat([(mine.of(grad_NO) * mine.of(rows_NO)).sum(dim=1) for mine in rectangles])


def _subtract(
    out_NO: Tensor, rows_NI: Tensor, factors: Factors, plan: _Plan, shift: float
) -> list[Tensor]:
    """out -= (x A^T + shift) G inside each task, in place; x A^T + shift, for the derivative."""
    spreads = []
    for mine, support in zip(plan.rows, plan.support, strict=True):
        spread = mine.of(rows_NI) @ support.of(factors.activations_SI).mT
        if shift:
            spread += shift
        mine.of(out_NO).baddbmm_(spread, support.of(factors.scaled_grads_SO), alpha=-1)
        spreads.append(spread)
    return spreads


def _subtract_backward(
    grad_NO: Tensor,
    rows_NI: Tensor,
    rows_grad_NI: Tensor | None,
    factors: Factors,
    spreads: list[Tensor],
    plan: _Plan,
    wants_factors: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the factors; those of the rows are added to what is there, in place."""
    of_activations = torch.empty_like(factors.activations_SI) if wants_factors else None
    of_grads = torch.empty_like(factors.scaled_grads_SO) if wants_factors else None
    for mine, support, spread in zip(plan.rows, plan.support, spreads, strict=True):
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
