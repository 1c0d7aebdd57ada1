"""One inner step that is solved instead of taken: the minimum of

    sum_n (g_n d_n + h_n d_n^2 / 2) + |w|^2 / (2 a),    d = J w

over all changes w of what adapts, where J are the Jacobians of the support rows' outputs, g and h
gradient and Hessian of each row's loss there, a the inner rate. It is ridge regression of the
outputs' errors in the space of their gradients, with as many unknowns as support rows:

    w = -a J^T s,    (I + a H K) s = g,    K = J J^T,    H = diag(h)

So a row's gradient counts s_n instead of g_n; for a small, s is g and w a gradient step.

Shape suffixes: T tasks, N rows, S support rows, I inputs, O outputs"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gmeta.losses.row_losses import curvatures_N, in_float32, row_grads_N
from gmeta.platform.numerics import multiply_in_float32

if TYPE_CHECKING:
    from gmeta.losses.objectives import Objectives
    from gmeta.losses.row_losses import LossFunction

# Numbers in the systems that are solved at a time: 16 MB in float32.
MOST_ENTRIES = 4_000_000
# Support rows of one task, where strangers send them: time grows with their cube.
MOST_SERVED_ROWS = 2_048


def check_solvable(name: str, objectives: Objectives) -> None:
    """Raise ValueError unless the inner loss is of one output and of each row alone."""
    losses = objectives.inner.losses
    if len(losses) > 1 or losses[0].ranks:
        problem = f"{len(losses)} labels" if len(losses) > 1 else f"the loss {losses[0].kind}"
        raise ValueError(
            f"algorithm.name = {name!r} with {problem}: its step is solved for one output and a "
            "loss of each row alone. Choose maml, or one label with bce, mse, huber or mae"
        )


def grad_and_hessian_N(
    loss: LossFunction, output_N: Tensor, label_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradient and Hessian of each row's loss by its output."""
    output_N = in_float32(output_N)
    label_N = label_N.to(output_N.dtype)
    if loss.own is not None:
        return row_grads_N(loss, output_N, label_N), curvatures_N(loss, output_N, label_N)
    if loss.kind == "bce":
        predicted_N = output_N.sigmoid()
        return predicted_N - label_N, predicted_N * (1.0 - predicted_N)
    if loss.kind == "mae":
        # MAE has no curvature: half the squared error takes its place.
        return output_N - label_N, torch.ones_like(output_N)
    grad_N = row_grads_N(loss, output_N, label_N)
    # Huber's curvature around 0 everywhere: no step then is too long.
    return grad_N, torch.full_like(output_N, 2.0 if loss.kind == "mse" else 1.0)


class LayerGradients(NamedTuple):
    """The gradients of the outputs of a task's support rows by one layer's weights, as factors; a
    row that uses the layer several times has as many rows here."""

    activations_TSI: Tensor
    jacobians_TSO: Tensor
    bias_rate: float  # 0 without a bias

    def kernel_TSS(self, rows: int) -> Tensor:
        """Return the inner products of the gradients of each pair of a task's `rows` rows."""
        # <a j^T, a' j'^T> = <a, a'> <j, j'>, and c <j, j'> of the bias: no Jacobian is ever formed,
        # which would have I O numbers a row.
        activations_TSI, jacobians_TSO = map(in_float32, (self.activations_TSI, self.jacobians_TSO))
        inputs_TSS = activations_TSI @ activations_TSI.mT + self.bias_rate
        uses_TSS = inputs_TSS * (jacobians_TSO @ jacobians_TSO.mT)
        tasks, uses = len(uses_TSS), uses_TSS.shape[1] // max(rows, 1)
        if uses == 1:
            return uses_TSS
        by_row_TSS: Tensor = uses_TSS.view(tasks, rows, uses, rows, uses).sum(dim=(2, 4))
        return by_row_TSS

    def of_tasks(self, first: int, last: int) -> LayerGradients:
        """Return the gradients of tasks `first` to `last` - 1."""
        return self._replace(
            activations_TSI=self.activations_TSI[first:last],
            jacobians_TSO=self.jacobians_TSO[first:last],
        )


def solve_TS(
    layers: Sequence[LayerGradients], grad_TS: Tensor, hessian_TS: Tensor, rate: float
) -> Tensor:
    """Return s of every task; it is 0 for padding rows, whose gradient is 0."""
    tasks, rows = grad_TS.shape
    if tasks <= 1:
        return _solve_block_TS(layers, grad_TS, hessian_TS, rate)
    # In chunks: one long task among short ones must not multiply its memory by theirs.
    at_a_time = max(1, MOST_ENTRIES // max(rows * rows, 1))
    found = []
    for first in range(0, tasks, at_a_time):
        last = first + at_a_time
        mine = [each.of_tasks(first, last) for each in layers]
        found.append(_solve_block_TS(mine, grad_TS[first:last], hessian_TS[first:last], rate))
    return torch.cat(found)


def _solve_block_TS(
    layers: Sequence[LayerGradients], grad_TS: Tensor, hessian_TS: Tensor, rate: float
) -> Tensor:
    rows = grad_TS.shape[1]
    # Rounding can make the kernel of similar rows have eigenvalues below 0, which the system
    # multiplies by a H: in bf16 solutions were many times too large.
    with multiply_in_float32(grad_TS.device):
        kernel_TSS = torch.stack([each.kernel_TSS(rows) for each in layers]).sum(dim=0)
    identity_SS = torch.eye(rows, dtype=grad_TS.dtype, device=grad_TS.device)
    # Not symmetric, but solvable where a row's curvature is 0 (bce that is sure, a padding row):
    # its s is then g, the plain gradient.
    system_TSS = identity_SS + rate * hessian_TS.unsqueeze(2) * kernel_TSS.to(grad_TS.dtype)
    # Unchecked: the eigenvalues are 1 or more, and asking would wait for a GPU.
    solution_TS1, _ = torch.linalg.solve_ex(system_TSS, grad_TS.unsqueeze(2))
    solved: Tensor = solution_TS1.squeeze(2)
    return solved
