"""An MLP adapted to every task of a batch, in few operations: the derivatives of its equations are
written out.

With h_0 the inputs and h_l = relu(z_l), layer l gives rows of a task

    z_l = g_l * (h_{l-1} W_l + b_l) - sum_j (h_{l-1} A_jl^T + c_l) (a G_jl)

where g_l are the task's gates (1 without), A_jl the activations that enter the layer on the support
rows in inner step j and G_jl the gradients of the support loss at z_l; a is the inner rate, c_l a
that of the biases. An inner step takes two passes over the support rows: forward for the
activations, and back for the gradients d_l at the outputs,

    d_{l-1} = [h_{l-1} > 0] * ((g_l * d_l) W_l^T - sum_j (d_l (a G_jl)^T) A_jl),   d_0 without [...]

Shape suffixes: T tasks, N rows, S support rows, L labels, I inputs, O outputs"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.adaptation.fused.fast_weight_update import FastWeightUpdate
from gmeta.adaptation.rates import WeightRates, scale_grads
from gmeta_models.ops.matmul import linear

if TYPE_CHECKING:
    from gmeta.adaptation.adaptation_plan import Path
    from gmeta.adaptation.fused.fast_weight_update import Grads, Saved, Sides
    from gmeta.adaptation.layout.padded_layout import PaddedRows
    from gmeta.adaptation.rates import LayerRate
    from gmeta.losses.objectives import RowLoss
    from gmeta_models.mlp import DropoutReLU

# autograd would find the derivatives below in five times as many operations, most of which
# allocate. Tests hold them to the equations as they stand, differentiated by autograd
# (tests/adaptation/fused/plain_mlp.py), and to the general loop.
_relu_backward = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class AdaptedMlp:
    """Linear layers with ReLU between them, and how far inner steps have moved each; one rate for a
    layer or for each of its outputs."""

    weights_OI: tuple[Tensor, ...]
    biases_O: tuple[Tensor, ...]
    gates_TO: tuple[Tensor | None, ...]
    paths: tuple[tuple[Path, ...], ...]  # of each layer in each rectangle; none if it stays
    support: PaddedRows
    bias_rates: tuple[float, ...]  # c of each layer
    updates: tuple[FastWeightUpdate, ...] = ()  # by layer; none before the first step

    def forward(
        self, inputs_NI: Tensor, rows: PaddedRows, dropout: DropoutReLU | None = None
    ) -> tuple[Tensor, ...]:
        """Return h_0, ..., h_{L-1} and z_L of rows of the tasks; `dropout` of h_1, ..., h_{L-1}."""
        layers = self._layers(rows)._replace(dropout=dropout)
        passed: tuple[Tensor, ...] = _Forward.apply(layers, inputs_NI.contiguous(), *layers.tensors)
        return passed

    def gradients(
        self, last_SO: Tensor, hidden: Sequence[Tensor], lowest: int
    ) -> tuple[Tensor, ...]:
        """Return d_lowest, ..., d_L of the support rows, from d_L and h_1, ..., h_{L-1}; d_0 is the
        gradient at the inputs."""
        if lowest == len(self.weights_OI):
            return (last_SO,)
        layers = self._layers(self.support)
        below: tuple[Tensor, ...] = _Gradients.apply(
            layers, lowest, last_SO.contiguous(), *hidden, *layers.tensors
        )
        return (*below, last_SO)

    def step_gradients(
        self, inputs_SI: Tensor, loss: RowLoss, lowest: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the activations h_0, ..., h_{L-1} of the support rows and the gradients d_lowest,
        ..., d_L of their loss."""
        *activations, last_SO = self.forward(inputs_SI, self.support)
        grads = self.gradients(loss.grad_NO(last_SO), activations[1:], lowest)
        return tuple(activations), grads

    def after_step(
        self, activations: Sequence[Tensor], grads: Sequence[Tensor], rates: Sequence[LayerRate]
    ) -> Self:
        """Return the MLP after one inner step, from what `step_gradients` returned."""
        # Counted from the end, as `grads` may begin at any layer below the lowest that adapts.
        mlp, count = self, len(self.weights_OI)
        for at, paths in enumerate(self.paths):
            if paths:
                mlp = mlp._with_layer_step(at, activations[at], grads[at - count], rates[at])
        return mlp

    @property
    def lowest_moving(self) -> int:
        """Return l of the lowest d_l that an inner step needs."""
        return next((at + 1 for at, paths in enumerate(self.paths) if paths), len(self.paths))

    def gates_of(self, rows: PaddedRows) -> list[Tensor | None]:
        """Return the gates of each row's task, by layer: [N, O]."""
        return [
            None if gate_TO is None else gate_TO.index_select(0, rows.task_N)
            for gate_TO in self.gates_TO
        ]

    @property
    def _updates(self) -> tuple[FastWeightUpdate, ...]:
        return self.updates or tuple(
            FastWeightUpdate(
                tuple(at for at, path in enumerate(paths) if path == "low_rank"),
                tuple(at for at, path in enumerate(paths) if path == "materialised"),
                bias_rate=bias_rate,
            )
            for paths, bias_rate in zip(self.paths, self.bias_rates, strict=True)
        )

    def _layers(self, rows: PaddedRows) -> _PassLayers:
        sides = rows.rectangles, self.support.rectangles
        return _PassLayers(
            self.weights_OI, self.biases_O, self.gates_of(rows), self._updates, sides
        )

    def _with_layer_step(
        self, at: int, activations_SI: Tensor, grads_SO: Tensor, rate: LayerRate
    ) -> Self:
        if isinstance(rate, WeightRates):
            raise TypeError(
                "a rate for each weight leaves no low rank: the general loop takes such"
            )
        updates, scaled_SO = list(self._updates), scale_grads(grads_SO, rate)
        updates[at] = updates[at].with_step(activations_SI, scaled_SO, self.support.rectangles)
        return replace(self, updates=tuple(updates))


class _PassLayers(NamedTuple):
    weights_OI: Sequence[Tensor]
    biases_O: Sequence[Tensor]
    gates_NO: Sequence[Tensor | None]  # of each row
    updates: Sequence[FastWeightUpdate]
    sides: Sides
    dropout: DropoutReLU | None = None

    @property
    def tensors(self) -> list[Tensor]:
        # All that autograd has to know of; `_LayerGrads.in_order` has this order, too.
        gates = [gate for gate in self.gates_NO if gate is not None]
        updates = [tensor for update in self.updates for tensor in update.flat]
        return [*self.weights_OI, *self.biases_O, *gates, *updates]

    @property
    def num_shared(self) -> int:
        # The tensors of the updates stand behind these.
        return 2 * len(self.updates) + sum(gate is not None for gate in self.gates_NO)


class _LayerGrads:
    def __init__(self, layers: _PassLayers) -> None:
        nothing: Grads = [None] * len(layers.updates)
        self.weights, self.biases, self.gates = nothing.copy(), nothing.copy(), nothing.copy()
        self.updates: list[Grads] = [[None] * len(update.flat) for update in layers.updates]
        self._gated = [at for at, gate in enumerate(layers.gates_NO) if gate is not None]

    @property
    def in_order(self) -> Grads:
        gates = [self.gates[at] for at in self._gated]
        updates = [grad for grads in self.updates for grad in grads]
        return [*self.weights, *self.biases, *gates, *updates]


# Both save all tensors, so that torch notices when one is changed before backward, and so that a
# result, which refers to its ctx, does not keep it alive. All else is freed by the first backward.


class _Forward(torch.autograd.Function):
    """Computes h_0, ..., h_{L-1} and z_L."""

    @staticmethod
    def forward(
        ctx: Any, layers: _PassLayers, inputs_NI: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        passed, ungated, saved, out_NO = [inputs_NI], {}, [], inputs_NI
        for at, gate_NO in enumerate(layers.gates_NO):
            if at:
                # In place: its derivative asks only where z > 0, and there h > 0 too.
                passed.append(out_NO.relu_())
                if layers.dropout is not None:
                    passed[-1] = layers.dropout.drop_out(passed[-1])
            out_NO = linear(passed[-1], layers.weights_OI[at], layers.biases_O[at])
            if gate_NO is not None:
                # Saved for the gradient of the gate.
                ungated[at], out_NO = out_NO, out_NO * gate_NO
            saved.append(layers.updates[at].subtract(out_NO, passed[-1], layers.sides))
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.ungated, ctx.saved = layers, ungated, saved
        ctx.save_for_backward(*passed, *tensors)
        # h_0 too, so that the gradients of its other uses are added up in this backward.
        return (inputs_NI.view_as(inputs_NI), *passed[1:], out_NO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        layers, ungated, saved = ctx.layers, ctx.ungated, ctx.saved
        ctx.layers = ctx.ungated = ctx.saved = None
        # A gradient that autograd hands over was made for this call alone, except for those at z_L
        # and d_0: products are added to the others in place.
        above, passed, found = _make_contiguous(above), ctx.saved_tensors, _LayerGrads(layers)
        wants_inputs, *wants = ctx.needs_input_grad[1:]
        wants_moved = any(wants[layers.num_shared :])
        grad, below = above[-1], None
        for at in reversed(range(len(layers.updates))):
            below = above[at] if at or wants_inputs else None
            if grad is not None:
                # `shared` reaches the weights that all tasks have, behind their gates: the change
                # of each task is not gated, and takes `grad`.
                shared, gate_NO = grad, layers.gates_NO[at]
                if gate_NO is not None:
                    found.gates[at], shared = grad * ungated[at], grad * gate_NO
                found.weights[at] = shared.mT @ passed[at]
                found.biases[at] = shared.sum(dim=0)
                if at or wants_inputs:
                    below = _add_product(below, shared, layers.weights_OI[at])
                found.updates[at] = layers.updates[at].subtract_backward(
                    saved[at], grad, passed[at], below, layers.sides, wants_moved
                )
            if at:
                grad = (
                    None
                    if below is None
                    else _relu_backward(below, passed[at], 0, grad_input=below)
                )
                if grad is not None and layers.dropout is not None:
                    # Units that are left out are 0, and have none already.
                    grad[:, layers.dropout.kept :].div_(1.0 - layers.dropout.share)
        return (None, below, *found.in_order)


class _Gradients(torch.autograd.Function):
    """Computes d_lowest, ..., d_{L-1} from d_L."""

    @staticmethod
    def forward(
        ctx: Any, layers: _PassLayers, lowest: int, last_SO: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, grads = tensors[: len(layers.updates) - 1], [last_SO]
        saved: list[Saved] = []
        for at in reversed(range(lowest, len(layers.updates))):
            gate_SO = layers.gates_NO[at]
            shared = grads[0] if gate_SO is None else grads[0] * gate_SO
            below = linear(shared, layers.weights_OI[at].mT)
            # Inner gradients are of support rows alone: sides[1] whatever rows `layers` are of.
            saved.insert(
                0, layers.updates[at].subtract_from_gradients(below, grads[0], layers.sides[1])
            )
            if at:
                _relu_backward(below, hidden[at - 1], 0, grad_input=below)
            grads.insert(0, below)
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.lowest, ctx.saved = layers, lowest, saved
        ctx.save_for_backward(*grads, *tensors)
        return tuple(grads[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        layers, lowest, saved, tensors = ctx.layers, ctx.lowest, ctx.saved, ctx.saved_tensors
        ctx.layers = ctx.saved = None
        count, found = len(layers.updates), _LayerGrads(layers)
        grads, hidden = tensors[: count + 1 - lowest], tensors[count + 1 - lowest :]
        # The pass went down from d_L, so its derivative goes up from d_lowest.
        below, *following = (*_make_contiguous(above), None)
        for at in range(lowest, count):
            onto = following[at - lowest]
            if below is None:
                below = onto
                continue
            if at:
                # [h > 0] x is linear in x: the derivative is the same mask.
                _relu_backward(below, hidden[at - 1], 0, grad_input=below)
            shared = grad = grads[at + 1 - lowest]
            gate_SO, matrix_IO = layers.gates_NO[at], layers.weights_OI[at].mT
            if gate_SO is None:
                carried = _add_product(onto, below, matrix_IO)
            else:
                carried = linear(below, layers.weights_OI[at])
                found.gates[at], shared = carried * grad, grad * gate_SO
                carried = carried.mul_(gate_SO) if onto is None else onto.addcmul_(carried, gate_SO)
            found.weights[at] = shared.mT @ below
            found.updates[at] = layers.updates[at].subtract_from_gradients_backward(
                saved[at - lowest], below, grad, carried, layers.sides[1]
            )
            below = carried
        # ReLU has no second derivative, so no gradient goes on to the activations h.
        return (None, None, below, *[None] * (count - 1), *found.in_order)


def _make_contiguous(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    # Views of rectangles need contiguous rows.
    return tuple(grad if grad is None else grad.contiguous() for grad in grads)


def _add_product(into: Tensor | None, rows_NI: Tensor, matrix_IO: Tensor) -> Tensor:
    return rows_NI @ matrix_IO if into is None else into.addmm_(rows_NI, matrix_IO)
