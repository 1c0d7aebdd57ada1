"""An MLP adapted to many tasks at once, and the gradients at its layers' outputs: operations with
their derivatives written out. The passes and the equations stand in mlp_passes.py.

autograd would find the same derivatives in five times as many operations, most of which allocate.

The gradients that autograd hands to a `backward` here are its own, but for those of what is not
made here, z_L and g_0: nobody else reads them, and sums are put in their place.

Shape suffixes: N rows of one side, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.adaptation.mlp_passes import (
    Found,
    grads_backward,
    grads_of,
    outputs_backward,
    outputs_of,
)

if TYPE_CHECKING:
    from gmeta.adaptation.losses import RowLoss
    from gmeta.adaptation.thin_products import Rectangles, Taken


@dataclass(frozen=True)
class AdaptedMlp:
    """Layers, and what the inner steps so far took from each.

    A layer without a gate has None for it; `support` are the rectangles of the support rows.
    """

    weights_OI: Sequence[Tensor]
    biases_O: Sequence[Tensor]
    gates_TO: Sequence[Tensor | None]
    taken: Sequence[Taken]
    support: Rectangles

    def outputs(self, inputs_NI: Tensor, rows: Rectangles) -> tuple[Tensor, ...]:
        """h_1, ..., h_{L-1} and z_L of rows in these rectangles."""
        outputs: tuple[Tensor, ...] = _Outputs.apply(
            self, rows, inputs_NI.contiguous(), *self._tensors
        )
        return outputs

    def grads(self, last: Tensor, hidden: Sequence[Tensor], lowest: int) -> tuple[Tensor, ...]:
        """g_lowest, ..., g_L of the support rows, from g_L and h_1, ..., h_{L-1}; of layers, g_0 is
        that of the inputs.
        """
        if lowest == len(self.taken):
            return (last,)
        below: tuple[Tensor, ...] = _Grads.apply(
            self, lowest, last.contiguous(), *hidden, *self._tensors
        )
        return (*below, last)

    def step(self, inputs_NI: Tensor, loss: RowLoss) -> tuple[list[Tensor], list[Tensor]]:
        """h_0, ..., h_{L-1} of the support rows, and g_0, ..., g_L of their loss."""
        found = _Step.apply(self, loss, inputs_NI.contiguous(), *self._tensors)
        return list(found[: len(self.taken)]), list(found[len(self.taken) :])

    def loss(self, inputs_NI: Tensor, rows: Rectangles, loss: RowLoss) -> Tensor:
        """The loss of rows in these rectangles: a scalar."""
        found: Tensor = _Loss.apply(self, rows, loss, inputs_NI.contiguous(), *self._tensors)
        return found

    @property
    def _tensors(self) -> list[Tensor]:
        """All that autograd has to know of; `Found.grads` are in their order."""
        gates = [gate for gate in self.gates_TO if gate is not None]
        taken = [tensor for taken in self.taken for tensor in taken.flat]
        return [*self.weights_OI, *self.biases_O, *gates, *taken]

    @property
    def num_shared(self) -> int:
        """How many of them are not what inner steps took."""
        return 2 * len(self.taken) + sum(gate is not None for gate in self.gates_TO)


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


# What a `ctx` keeps of an MLP goes with the first backward; outputs it must save, as it would keep
# itself alive by them.


class _Outputs(torch.autograd.Function):
    @staticmethod
    @_below_autograd
    def forward(
        ctx: Any, mlp: AdaptedMlp, rows: Rectangles, inputs_NI: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        seen, last_NO = outputs_of(mlp, rows, inputs_NI)
        ctx.set_materialize_grads(False)
        ctx.mlp, ctx.seen = mlp, seen._replace(layers=())
        ctx.save_for_backward(*seen.layers)
        return (*seen.layers[1:], last_NO)

    @staticmethod
    @_derivative
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        seen, found = ctx.seen._replace(layers=ctx.saved_tensors), Found(ctx.mlp)
        ctx.mlp = ctx.seen = None
        needs, above = ctx.needs_input_grad, _contiguous(above)
        inputs = outputs_backward(
            found, seen, above[-1], above, needs[2], any(needs[3 + found.mlp.num_shared :])
        )
        return (None, None, inputs, *found.grads)


class _Grads(torch.autograd.Function):
    @staticmethod
    @_below_autograd
    def forward(
        ctx: Any, mlp: AdaptedMlp, lowest: int, last: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        hidden = tensors[: len(mlp.taken) - 1]
        grads, ctx.spreads = grads_of(mlp, last, hidden, lowest)
        ctx.set_materialize_grads(False)
        ctx.mlp = mlp
        ctx.save_for_backward(*hidden, *grads)
        return tuple(grads[:-1])

    @staticmethod
    @_derivative
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        found, spreads = Found(ctx.mlp), ctx.spreads
        ctx.mlp = ctx.spreads = None
        count = len(found.mlp.taken) - 1
        hidden, grads = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        last = grads_backward(found, grads, spreads, hidden, (*_contiguous(above), None))
        return (None, None, last, *[None] * count, *found.grads)


class _Step(torch.autograd.Function):
    """Outputs, and the gradients of a loss of them."""

    @staticmethod
    @_below_autograd
    def forward(
        ctx: Any, mlp: AdaptedMlp, loss: RowLoss, inputs_NI: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        seen, last_NO = outputs_of(mlp, mlp.support, inputs_NI)
        hidden = seen.layers[1:]
        grads, ctx.spreads = grads_of(mlp, loss.slope_NO(last_NO), hidden, 0)
        ctx.set_materialize_grads(False)
        ctx.mlp, ctx.loss, ctx.seen = mlp, loss, seen._replace(layers=())
        ctx.save_for_backward(last_NO, *seen.layers, *grads)
        # The inputs, too, so that the gradient of what else sees them is at hand here.
        return (inputs_NI.view_as(inputs_NI), *hidden, *grads)

    @staticmethod
    @_derivative
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        found, loss, spreads = Found(ctx.mlp), ctx.loss, ctx.spreads
        count, (last_NO, *saved) = len(found.mlp.taken), ctx.saved_tensors
        seen, grads = ctx.seen._replace(layers=saved[:count]), saved[count:]
        ctx.mlp = ctx.seen = ctx.spreads = None
        needs, above = ctx.needs_input_grad, _contiguous(above)
        inputs, hidden, above = above[0], above[1:count], above[count:]
        last = grads_backward(found, grads, spreads, seen.layers[1:], above)
        if last is not None:
            last = last * loss.curvature_NO(last_NO)
        inputs = outputs_backward(
            found, seen, last, hidden, needs[2], any(needs[3 + found.mlp.num_shared :]), inputs
        )
        return (None, None, inputs, *found.grads)


class _Loss(torch.autograd.Function):
    @staticmethod
    @_below_autograd
    def forward(
        ctx: Any,
        mlp: AdaptedMlp,
        rows: Rectangles,
        loss: RowLoss,
        inputs_NI: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.seen, ctx.last_NO = outputs_of(mlp, rows, inputs_NI)
        ctx.mlp, ctx.loss = mlp, loss
        # So that torch notices when one of them is changed before backward.
        ctx.save_for_backward(inputs_NI, *tensors)
        return loss.sum(ctx.last_NO)

    @staticmethod
    @_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        found, seen, needs = Found(ctx.mlp), ctx.seen, ctx.needs_input_grad
        last = ctx.loss.slope_NO(ctx.last_NO, grads[0])
        ctx.mlp = ctx.seen = ctx.last_NO = None
        above = [None] * len(found.mlp.taken)
        inputs = outputs_backward(
            found, seen, last, above, needs[3], any(needs[4 + found.mlp.num_shared :])
        )
        return (None, None, None, inputs, *found.grads)


def _contiguous(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """As rectangles are cut from them."""
    return tuple(grad if grad is None else grad.contiguous() for grad in grads)
