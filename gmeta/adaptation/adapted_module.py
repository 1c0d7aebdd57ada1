"""MAML of any torch module, without a config: its linear layers adapt to many tasks at once.

    for x, y, lengths, query_x, query_y, query_lengths in batches:
        adapted = adapt(module, x, y, lengths, row_loss, steps=2, rate=0.1)
        row_loss(adapted(query_x, query_lengths), query_y).mean().backward()
        optimizer.step()

Rows stand task by task, and `lengths_T` says how many each task has.

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

Inputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class AdaptedModule:
    """A module after its inner steps, for every task."""

    module: nn.Module
    layers: AdaptedLayers

    def __call__(self, inputs: Inputs, lengths_T: Tensor) -> Tensor:
        """Return the module's outputs on rows of the same tasks, each with its task's weights."""
        with self.layers.apply(RowLayout.of(lengths_T)):
            output: Tensor = self.module(*_as_tuple(inputs))
        return output

    def fast_weights(self, task: int) -> dict[str, Tensor]:
        """Return a task's parameters by name, for torch.func.functional_call. Those that moved are
        differentiable where the steps were of second order."""
        found: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        for name, change in self.layers.changes.items():
            moved = change.to_matrix()
            found[f"{name}.weight"] = found[f"{name}.weight"] - moved.weight_TIO[task].mT
            if f"{name}.bias" in found:
                found[f"{name}.bias"] = found[f"{name}.bias"] - moved.bias_T1O[task, 0]
        return found


def adapt(
    module: nn.Module,
    support: Inputs,
    label_N: Tensor,
    lengths_T: Tensor,
    row_loss: Callable[[Tensor, Tensor], Tensor],
    *,
    steps: int = 1,
    rate: float = 0.05,
    adapt_layers: Sequence[str] = ("*",),
    second_order: bool = True,
) -> AdaptedModule:
    """Return the module after `steps` inner steps on every task's mean support loss.

    `row_loss` gives the loss [N] of outputs and labels. Linear layers that match `adapt_layers`
    adapt; other parameters learn in the outer step alone. Without `second_order` the inner
    gradients are constants (FOMAML). Raises ValueError: a pattern matches no layer."""
    config = AlgorithmConfig(
        inner_steps=steps, inner_lr=rate, adapt_layers=tuple(adapt_layers), adapt_embeddings=False
    )
    plan, layout = AdaptationPlan.of(module, config), RowLayout.of(lengths_T)
    # The query's rows are not known yet: as many are taken to choose the cheaper path of a layer.
    size = TaskSize(layout.longest, layout.longest)
    layers = AdaptedLayers(plan, FixedRates(rate), size, {})
    for _ in range(steps if layout.num_rows else 0):
        # Also where a prediction is made without gradients.
        with torch.enable_grad():
            with layers.apply(layout) as tape:
                output = module(*_as_tuple(support))
            loss_N = row_loss(output, label_N)
            if loss_N.shape != (layout.num_rows,):
                raise UserError(
                    f"row_loss gives a tensor of shape {list(loss_N.shape)}: the loss of each of "
                    f"{layout.num_rows} rows is needed. Leave out its mean: reduction='none'"
                )
            # All tasks at once: they share no adapted value, so the sum's gradient is each one's.
            loss_sum = weighted_sum(loss_N, layout.mean_weights_N(loss_N.dtype))
            grads = torch.autograd.grad(loss_sum, tape.outputs, create_graph=second_order)
            layers.step(tape, grads, second_order)
    return AdaptedModule(module, layers)


def _as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)
