"""The passes of rows through an MLP that is adapted to many tasks, and of gradients back through
it, with the derivatives of both.

Let h_0 be the inputs and h_l = relu(z_l) what layer l gives. As in linear.py, a task's layer is the
shared one less what its inner steps j took, A_j^T G_j with the rates inside G_j:

    z_l = h_{l-1} W_l + b_l - sum_j (h_{l-1} A_jl^T + 1) G_jl                          (outputs_of)

The gradients g_l of a loss at the outputs z_l follow from that at the last one,

    g_{l-1} = m_{l-1} * (g_l W_l^T - sum_j (g_l G_jl^T) A_jl),   m_l = [h_l > 0], m_0 = 1 (grads_of)

where a gated layer (models/gated.py) has diag(g_t) h W + g_t b in place of h W + b, and a gradient
times g_t in the product with W_l^T. An inner step is one more pair of factors, (h_{l-1}, rate *
g_l). Both passes are a product with a shared matrix less products inside each task, so both share
the code of that and of its derivative. ReLU has no second derivative: `grads_of` passes none on to
h.

Shape suffixes: N rows of one side, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gmeta.adaptation.thin_products import gate_grad, gated_rows
from models.products import add_times, over_rows, times

if TYPE_CHECKING:
    from gmeta.adaptation.fused_mlp import AdaptedMlp
    from gmeta.adaptation.thin_products import Grads, Rectangles, Spreads

_threshold_backward = torch.ops.aten.threshold_backward.grad_input


class Seen(NamedTuple):
    """What a pass over rows saw."""

    rows: Rectangles
    layers: Sequence[Tensor]  # h_0, ..., h_{L-1}
    ungated: dict[int, Tensor]  # what a gate multiplied, by layer
    spreads: list[Spreads]


@dataclass
class Found:
    """What is known of the gradients of an MLP's tensors."""

    mlp: AdaptedMlp
    weights: dict[int, Tensor] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, Grads] = field(default_factory=dict)

    def add_taken(self, at: int, more: Grads) -> None:
        """Of what inner steps took from a layer."""
        before = self.taken.get(at)
        if before is not None:
            more = [_sum(*pair) for pair in zip(before, more, strict=True)]
        self.taken[at] = more

    def add_gate(self, at: int, more: Tensor) -> None:
        """Of the gate of a layer."""
        before = self.gates.get(at)
        self.gates[at] = more if before is None else before.add_(more)

    @property
    def grads(self) -> Grads:
        """In the order of the tensors."""
        found: Grads = []
        layers = range(len(self.mlp.taken))
        found += map(self.weights.get, layers)
        found += map(self.biases.get, layers)
        found += [self.gates.get(at) for at in layers if self.mlp.gates_TO[at] is not None]
        for at, taken in enumerate(self.mlp.taken):
            found += self.taken.get(at) or [None] * len(taken.flat)
        return found


def outputs_of(mlp: AdaptedMlp, rows: Rectangles, inputs_NI: Tensor) -> tuple[Seen, Tensor]:
    """What is seen on the way to z_L, and that."""
    seen = Seen(rows, layers := [inputs_NI], {}, [])
    sides = rows, mlp.support
    out_NO = inputs_NI
    for at, weight_OI in enumerate(mlp.weights_OI):
        if at:
            layers.append(out_NO.relu_())
        out_NO = times(layers[-1], weight_OI.mT, mlp.biases_O[at])
        gate_TO = mlp.gates_TO[at]
        if gate_TO is not None:
            seen.ungated[at] = out_NO
            out_NO = gated_rows(out_NO, gate_TO, rows)
        seen.spreads.append(mlp.taken[at].subtract(out_NO, layers[-1], sides))
    return seen, out_NO


def outputs_backward(
    found: Found,
    seen: Seen,
    last: Tensor | None,
    above: Sequence[Tensor | None],
    wants_inputs: bool,
    wants_taken: bool,
    inputs: Tensor | None = None,
) -> Tensor | None:
    """The gradient of the inputs, added to what is known of it, from those of z_L and of h_1, ...,
    h_{L-1}.
    """
    mlp, grad, before = found.mlp, last, None
    sides = seen.rows, mlp.support
    for at in reversed(range(len(mlp.weights_OI))):
        before = above[at - 1] if at else inputs if wants_inputs else None
        if grad is not None:
            shared, gate_TO = grad, mlp.gates_TO[at]
            if gate_TO is not None:
                found.add_gate(at, gate_grad(grad, seen.ungated[at], seen.rows))
                shared = gated_rows(grad, gate_TO, seen.rows)
            found.weights[at] = over_rows(shared, seen.layers[at], found.weights.get(at))
            found.biases[at] = shared.sum(dim=0)
            if at or wants_inputs:
                before = _onto(before, shared, mlp.weights_OI[at])
            taken = mlp.taken[at].subtract_backward(
                seen.spreads[at], grad, seen.layers[at], before, sides, wants_taken
            )
            found.add_taken(at, taken)
        if at:
            grad = None if before is None else _where_active_(before, seen.layers[at])
    return before


def grads_of(
    mlp: AdaptedMlp, last: Tensor, hidden: Sequence[Tensor], lowest: int
) -> tuple[list[Tensor], list[Spreads]]:
    """g_lowest, ..., g_L, and what their derivatives need, from layer `lowest` on."""
    grads, spreads = [last], []
    for at in reversed(range(lowest, len(mlp.weights_OI))):
        gate_TO, shared = mlp.gates_TO[at], grads[-1]
        if gate_TO is not None:
            shared = gated_rows(shared, gate_TO, mlp.support)
        below_NI = times(shared, mlp.weights_OI[at])
        spreads.append(mlp.taken[at].turned(below_NI, grads[-1], mlp.support))
        grads.append(_where_active_(below_NI, hidden[at - 1]) if at else below_NI)
    return grads[::-1], spreads[::-1]


def grads_backward(
    found: Found,
    grads: Sequence[Tensor],
    spreads: list[Spreads],
    hidden: Sequence[Tensor],
    above: Sequence[Tensor | None],
) -> Tensor | None:
    """The gradient of g_L from those of g_lowest, ..., g_L, itself included."""
    mlp, below_NI = found.mlp, above[0]
    lowest = len(mlp.weights_OI) + 1 - len(grads)
    for at in range(lowest, len(mlp.weights_OI)):
        following = above[at + 1 - lowest]
        if below_NI is None:
            below_NI = following
            continue
        if at:
            below_NI = _where_active_(below_NI, hidden[at - 1])
        shared = grad = grads[at + 1 - lowest]
        gate_TO = mlp.gates_TO[at]
        if gate_TO is None:
            carried = _onto(following, below_NI, mlp.weights_OI[at].mT)
        else:
            carried = times(below_NI, mlp.weights_OI[at].mT)
            found.add_gate(at, gate_grad(grad, carried, mlp.support))
            carried = gated_rows(carried, gate_TO, mlp.support)
            carried = carried if following is None else carried.add_(following)
            shared = gated_rows(grad, gate_TO, mlp.support)
        found.weights[at] = over_rows(shared, below_NI, found.weights.get(at))
        taken = mlp.taken[at].turned_backward(
            spreads[at - lowest], below_NI, grad, carried, mlp.support
        )
        found.add_taken(at, taken)
        below_NI = carried
    return below_NI


def _where_active_(grad: Tensor, hidden: Tensor) -> Tensor:
    """The gradient before a ReLU from that after it, in its place."""
    before: Tensor = _threshold_backward(grad, hidden, 0, grad_input=grad)
    return before


def _onto(into: Tensor | None, rows_NI: Tensor, matrix_IO: Tensor) -> Tensor:
    """rows matrix, added to what there is, in place."""
    if into is None:
        return times(rows_NI, matrix_IO)
    add_times(into, rows_NI, matrix_IO, beta=1.0)
    return into


def _sum(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of what there is, in place of the first."""
    if own is None or other is None:
        return other if own is None else own
    return own.add_(other)
