"""One inner step that is solved in place of taken: the minimum of

    sum_n (g_n d_n + h_n d_n^2 / 2) + |w|^2 / (2 a),    d = J w

over all changes w of what adapts, where J are the Jacobians of the support rows' outputs, g and h
slope and curvature of each row's loss there, a the inner rate. It is ridge regression of what the
outputs lack, in the space of their gradients, and has as many unknowns as support rows:

    w = -a J^T s,    (I + a H K) s = g,    K = J J^T,    H = diag(h)

So a row's gradient counts s_n in place of g_n; for a small, s is g and w a gradient step.

Shape suffixes: T tasks, S support rows, N rows of all tasks, I input width, O output width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gmeta.losses.row_losses import in_float32, row_slopes_N

if TYPE_CHECKING:
    from gmeta.losses.objectives import Objectives
    from gmeta.losses.row_losses import LossFunction


def check_solvable(name: str, objectives: Objectives) -> None:
    """Check that the inner loss is of one output, and of each row alone.

    Raises:
        ValueError: it is not; `name` is the algorithm's.
    """
    losses = objectives.inner.losses
    if len(losses) > 1 or losses[0].ranks:
        told = f"{len(losses)} labels" if len(losses) > 1 else f"the loss {losses[0].kind}"
        raise ValueError(
            f"algorithm.name = {name!r} with {told}: its step is solved for one output and a loss "
            "of each row alone. Choose maml, or one label with bce, mse, huber or mae"
        )


def slopes_and_bends_N(
    loss: LossFunction, output_N: Tensor, label_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return slope and curvature of each row's loss by its output.

    Huber's loss is taken to bend everywhere as it does around 0, so that the step never is too
    long; mae, which bends nowhere, is taken for half the squared error.
    """
    output_N = in_float32(output_N)
    label_N = label_N.to(output_N.dtype)
    if loss.kind == "bce":
        predicted_N = output_N.sigmoid()
        return predicted_N - label_N, predicted_N * (1.0 - predicted_N)
    if loss.kind == "mae":
        return output_N - label_N, torch.ones_like(output_N)
    slope_N = row_slopes_N(loss, output_N, label_N)
    return slope_N, torch.full_like(output_N, 2.0 if loss.kind == "mse" else 1.0)


def layer_kernel_TSS(
    activations_TSI: Tensor, jacobians_TSO: Tensor, bias_rate: float, rows: int
) -> Tensor:
    """Return what one layer adds to K, of so many rows a task, each of which used the layer as
    often: the inner products of the gradients of two rows' outputs by the layer's weights and bias.
    """
    inputs_TSS = activations_TSI @ activations_TSI.mT + bias_rate
    uses_TSS = inputs_TSS * (jacobians_TSO @ jacobians_TSO.mT)
    tasks, uses = len(uses_TSS), uses_TSS.shape[1] // max(rows, 1)
    if uses == 1:
        return uses_TSS
    by_row_TSS: Tensor = uses_TSS.view(tasks, rows, uses, rows, uses).sum(dim=(2, 4))
    return by_row_TSS


def solved_TS(kernel_TSS: Tensor, slope_TS: Tensor, bend_TS: Tensor, rate: float) -> Tensor:
    """Return s of every task; rows that pad, whose slope is 0, have 0."""
    kernel_TSS = kernel_TSS.to(slope_TS.dtype)
    identity_SS = torch.eye(kernel_TSS.shape[1], dtype=slope_TS.dtype, device=slope_TS.device)
    system_TSS = identity_SS + rate * bend_TS.unsqueeze(2) * kernel_TSS
    # Unchecked: the eigenvalues are 1 or more, and asking would wait for a GPU.
    solution_TS1, _ = torch.linalg.solve_ex(system_TSS, slope_TS.unsqueeze(2))
    solved: Tensor = solution_TS1.squeeze(2)
    return solved
