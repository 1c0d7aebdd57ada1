"""MAML's inner loop on a torch module of one's own, without a config: all tasks at once.

Shape suffixes: T tasks, N rows, I inputs, O outputs"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gmeta.adaptation.adaptation_plan import AdaptationPlan, TaskSize
from gmeta.adaptation.adapted_layers import AdaptedLayers
from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.adaptation.rates import FixedRates
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import UserError
from gmeta.losses.row_losses import weighted_sum

# Of outputs and labels [N], the loss of each row [N].
RowLosses = Callable[[Tensor, Tensor], Tensor]
# One argument of the module, or several: each [N, ...].
Inputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class AdaptedTasks:
    """A module adapted to T tasks: call it on rows of the same tasks."""

    model: nn.Module
    row_losses: RowLosses
    layers: AdaptedLayers

    def __call__(self, inputs: Inputs, lengths_T: Tensor) -> Tensor:
        """Return the outputs on rows [N, ...] that stand task by task, `lengths_T` of each."""
        with self.layers.apply(RowLayout.of(lengths_T)):
            output: Tensor = self.model(*_as_tuple(inputs))
        return output

    def mean_loss(self, inputs: Inputs, label_N: Tensor, lengths_T: Tensor) -> Tensor:
        """Return the mean over tasks of the mean loss of their rows, to call `backward` of."""
        losses_N, layout = (
            self.row_losses(self(inputs, lengths_T), label_N),
            RowLayout.of(lengths_T),
        )
        _check_losses(losses_N, layout)
        weights_N = layout.mean_weights_N(losses_N.dtype)
        return weighted_sum(losses_N, weights_N) / max(lengths_T.numel(), 1)

    def fast_weights(self, task: int) -> dict[str, Tensor]:
        """Return a task's parameters by name, for torch.func.functional_call."""
        found: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        for name, change in self.layers.changes.items():
            moved = change.to_matrix()
            found[f"{name}.weight"] = found[f"{name}.weight"] - moved.weight_TIO[task].mT
            if f"{name}.bias" in found:
                found[f"{name}.bias"] = found[f"{name}.bias"] - moved.bias_T1O[task, 0]
        return found


class TaskAdapter:
    """Adapts the linear layers of a module to tasks by gradient steps on their support rows.

    The module takes rows [N, ...] and treats each by itself. `layers` are patterns of the names of
    the layers that adapt. With `second_order` the query loss has MAML's exact gradient, without it
    that of first-order MAML (Finn et al., arXiv 1703.03400)."""

    def __init__(
        self, model: nn.Module, row_losses: RowLosses, *, inner_lr: float = 0.1,
        inner_steps: int = 1, layers: Sequence[str] = ("*",), second_order: bool = True,
    ) -> None:  # fmt: skip
        config = AlgorithmConfig(
            name="maml",
            inner_lr=inner_lr,
            inner_steps=inner_steps,
            adapt_layers=tuple(layers),
            adapt_embeddings=False,
        )
        self._model, self._row_losses = model, row_losses
        self._plan, self._rates = AdaptationPlan.of(model, config), FixedRates(inner_lr)
        self._second_order = second_order

    def adapt(self, inputs: Inputs, label_N: Tensor, lengths_T: Tensor) -> AdaptedTasks:
        """Return the module adapted to T tasks by their support rows [N, ...], task by task.

        A task of 0 rows stays as it is."""
        layout = RowLayout.of(lengths_T)
        size = TaskSize(layout.longest, layout.longest)
        layers = AdaptedLayers(self._plan, self._rates, size, {})
        for _ in range(self._plan.config.inner_steps if layout.num_rows else 0):
            with torch.enable_grad(), layers.apply(layout) as tape:
                losses_N = self._row_losses(self._model(*_as_tuple(inputs)), label_N)
                _check_losses(losses_N, layout)
                loss = weighted_sum(losses_N, layout.mean_weights_N(losses_N.dtype))
            # All tasks at once: they share no adapted value, so the sum's gradient is each one's.
            grads = torch.autograd.grad(loss, tape.outputs, create_graph=self._second_order)
            layers.step(tape, grads, self._second_order)
        return AdaptedTasks(self._model, self._row_losses, layers)


def _as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _check_losses(losses_N: Tensor, layout: RowLayout) -> None:
    if losses_N.shape != (layout.num_rows,):
        raise UserError(
            f"row_losses gives a tensor of shape {list(losses_N.shape)}: the loss of each of "
            f"{layout.num_rows} rows is needed. Leave out its mean: reduction='none'"
        )
