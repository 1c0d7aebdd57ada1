"""An MLP adapted to every task of a batch: its equations, and what its two kernels offer.

With h_0 the inputs and h_l = relu(z_l), layer l gives rows of a task

    z_l = g_l * (h_{l-1} W_l + b_l) - sum_j (h_{l-1} A_jl^T + c_l) (a G_jl)

where g_l are the task's gates (1 without), and inner step j found the activations A_jl that enter
the layer on the support rows and the gradients G_jl of the support loss at z_l; a is the inner
rate, c_l a that of the biases. So an inner step takes two passes over the support rows: forward for
the activations, and back for the gradients d_l at the outputs,

    d_{l-1} = [h_{l-1} > 0] * ((g_l * d_l) W_l^T - sum_j (d_l (a G_jl)^T) A_jl),   d_0 without [...]

fast_mlp.py has the derivatives written out; plain_mlp.py is these equations, differentiated by
autograd: the definition, which tests hold it to. Both are tested against the general loop.

Shape suffixes: T tasks, N rows, S support rows, L labels, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor

    from gmeta.adaptation.adaptation_plan import Path
    from gmeta.adaptation.layout.padded_layout import PaddedRows
    from gmeta.adaptation.rates import LayerRate
    from gmeta.losses.objectives import RowLoss


@dataclass(frozen=True)
class AdaptedMlp(ABC):
    """Linear layers with ReLU between them, and how far the inner steps so far have moved each."""

    weights_OI: tuple[Tensor, ...]
    biases_O: tuple[Tensor, ...]
    gates_TO: tuple[Tensor | None, ...]
    paths: tuple[tuple[Path, ...], ...]  # of each layer in each rectangle; none if it stays
    support: PaddedRows
    bias_rates: tuple[float, ...]  # c of each layer

    @abstractmethod
    def forward(self, inputs_NI: Tensor, rows: PaddedRows) -> tuple[Tensor, ...]:
        """Return h_0, ..., h_{L-1} and z_L of rows of the tasks."""

    @abstractmethod
    def gradients(
        self, last_SO: Tensor, hidden: Sequence[Tensor], lowest: int
    ) -> tuple[Tensor, ...]:
        """Return d_lowest, ..., d_L of the support rows, from d_L and h_1, ..., h_{L-1}.

        d_0 is the gradient at the inputs.
        """

    @abstractmethod
    def _with_layer_step(
        self, at: int, activations_SI: Tensor, grads_SO: Tensor, rate: LayerRate
    ) -> Self:
        """Return the MLP with layer `at` after one more inner step."""

    def step_gradients(
        self, inputs_SI: Tensor, loss: RowLoss, lowest: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the activations h_0, ..., h_{L-1} of the support rows and the gradients d_lowest,
        ..., d_L of their loss.
        """
        *activations, last_SO = self.forward(inputs_SI, self.support)
        grads = self.gradients(loss.grad_NO(last_SO), activations[1:], lowest)
        return tuple(activations), grads

    def after_step(
        self, activations: Sequence[Tensor], grads: Sequence[Tensor], rates: Sequence[LayerRate]
    ) -> Self:
        """Return the MLP after one inner step, from what `step_gradients` returned.

        `grads` may begin at any layer below the lowest that adapts; `rates` has one for each layer.
        """
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
