"""The query loss after k inner steps on decision layers whose inputs no step moves: one operation,
with its derivative written out.

With h_0 = x and h_l = relu(z_l), a pass over rows of a task that took steps 1 to j gives

    z_l = gate * (h_{l-1} W_l + b_l) - (h_{l-1} D_l + d_l)

for the changes D, d of changes.py, and the gradients of the support loss at the z_l are

    g_L = w * loss'(z_L),    g_{l-1} = [h_{l-1} > 0] * ((gate * g_l) W_l^T - g_l D_l^T)

Step j adds (h_{l-1}, rate * g_l) to the change of layer l. `backward` goes through the same passes
in reverse. autograd would find the same, in several times as many operations: on a CPU those cost
more than the arithmetic. All passes share h_0 W_1 + b_1 and, in second order, one product over both
sides' rows gives it.

Shape suffixes: N support rows, M query rows, R both, X inputs of the first layer, I and O widths of
a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gmeta.adaptation.fixed_passes import Passes
from gmeta.adaptation.fixed_state import FixedLoop


def query_loss_sum(
    loop: FixedLoop,
    inputs: Tensor,
    weights_OI: Sequence[Tensor],
    biases_O: Sequence[Tensor],
    gates_RO: Sequence[Tensor],
    common_T: Tensor | None = None,
) -> Tensor:
    """Sum over the tasks of the mean query loss: a scalar.

    `inputs` are [R, X], support first; in first order [M, X]. Gates are those of gated layers. With
    `common_T` (common.py) the first of the biases is [T, O].
    """
    learned = [rate for rate in loop.rates if isinstance(rate, Tensor)]
    loss: Tensor = _QueryLoss.apply(
        loop,
        inputs.contiguous(),
        *weights_OI,
        *biases_O,
        *gates_RO,
        *([] if common_T is None else [common_T]),
        *learned,
    )
    return loss


class _QueryLoss(Function):
    @staticmethod
    def forward(ctx: Any, loop: FixedLoop, inputs: Tensor, *tensors: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # some 250 small calls, a tenth shorter each
            passes = Passes(loop, inputs, tensors)
            loss = passes.run()
        ctx.passes = passes
        # So that torch notices when one of them is changed before backward.
        ctx.save_for_backward(inputs, *tensors)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        passes, layers = ctx.passes, ctx.passes.layers
        ctx.passes = None
        with torch._C._AutoDispatchBelowAutograd():
            inputs_grad = passes.backward(grads[0], ctx.needs_input_grad[1])
            gates = [layer.gate_grad() for layer in layers if layer.gates]
            common = passes.common_grads()
        rates = [layer.rate_grad for layer in layers if isinstance(layer.rate, Tensor)]
        weights, biases = [x.weight_grad for x in layers], [x.bias_grad for x in layers]
        return (None, inputs_grad, *weights, *biases, *gates, *common, *rates)
