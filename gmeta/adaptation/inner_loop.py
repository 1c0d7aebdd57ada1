"""The inner loop: from support rows to adapted parameters, and the model's outputs with them.

theta_t <- theta_t - a grad L_support(theta_t), k times, for the chosen linear layers and, if asked,
for the task's copy of the embedding rows it uses. What an algorithm makes of it stands in its own
file.

Shape suffixes: N rows, P distinct (task, row) pairs, D embedding width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.adaptation.costs import PathCosts
from gmeta.adaptation.layout import RowLayout
from gmeta.adaptation.linear import AdaptedLayers, adaptable_layers
from gmeta.adaptation.losses import row_losses_N, weighted_sum
from gmeta.adaptation.paths import paths_of_layers
from gmeta.adaptation.rates import InnerRates
from gmeta.adaptation.side import Side
from models.gated import GatedModel, row_layers
from models.inputs import RowInputs


@dataclass(frozen=True)
class WorkingRows:
    """The embedding rows that the sides index, and the rate at which they adapt.

    Where embeddings adapt, every (task, id) has a row of its own.
    """

    values_PD: Tensor
    rate: float | Tensor  # broadcasts against values_PD


@dataclass(frozen=True)
class Adapted:
    """What k inner steps made of a model, for every task."""

    layers: AdaptedLayers
    rows_PD: Tensor
    # Before each step, the sum over the tasks of the (shrunken) mean support loss; none without
    # support rows.
    support_loss_sums: tuple[Tensor, ...] = ()


class InnerLoop:
    """k SGD steps on every task's support set, all tasks at once; owns no parameters."""

    def __init__(
        self, model: nn.Module, config: AlgorithmConfig, loss: str, rates: InnerRates
    ) -> None:
        self.config = config
        self._model = model
        self._loss = loss
        self._rates = rates
        self._row_layers = row_layers(model)
        self._layers = adaptable_layers(model, config.adapt_layers)
        self._paths = paths_of_layers(config, list(self._layers))
        if not self._layers and not config.adapt_embeddings:
            raise ValueError(
                "algorithm.adapt_layers = [] and algorithm.adapt_embeddings = false: "
                'nothing would adapt. Set one of them, or algorithm.name = "none" with any of '
                "them for the plain baseline"
            )

    def adapt(
        self,
        rows: WorkingRows,
        support: Side,
        query_rows: int,
        second_order: bool,
        keep_path: bool = False,
    ) -> Adapted:
        """k inner steps from the meta-parameters.

        With `second_order` the result is differentiable through the inner gradients, else they are
        constants; `keep_path` then still keeps the support losses differentiable, at the price of
        their graphs. `query_rows` (of the longest task) only helps to choose the cheaper path.
        """
        steps = self.config.inner_steps
        costs = PathCosts(support.layout.longest, query_rows, steps)
        gated = self._gated(support.inputs(rows.values_PD), support.layout)
        layers = AdaptedLayers(self._layers, self._rates, self._paths, costs, gated)
        adapted = Adapted(layers, rows.values_PD)
        for _ in range(steps if support.layout.num_rows else 0):
            adapted = self._step(adapted, rows.rate, support, second_order, keep_path)
        return adapted

    def unadapted(self, rows: WorkingRows, side: Side) -> Adapted:
        """The meta-parameters as they are, for tasks of which nothing is known yet."""
        nothing = side.inputs(rows.values_PD).no_rows()
        no_rows = RowLayout.of(torch.zeros_like(side.layout.lengths_T))
        layers = AdaptedLayers.unadapted(self._gated(nothing, no_rows))
        return Adapted(layers, rows.values_PD)

    def output_N(self, adapted: Adapted, side: Side) -> Tensor:
        """Outputs on the rows of a side at the adapted parameters: [N of the side]."""
        with adapted.layers.applied(side.layout):
            output: Tensor = self._model(side.inputs(adapted.rows_PD))
        return output

    def losses_N(self, adapted: Adapted, side: Side) -> Tensor:
        """Loss of each row of a side at the adapted parameters."""
        return row_losses_N(self._loss, self.output_N(adapted, side), side.label_N)

    def loss_sum(self, adapted: Adapted, side: Side) -> Tensor:
        """Sum over the tasks of the mean loss of their rows, at the adapted parameters: a scalar.

        A task without rows counts 0.
        """
        losses_N = self.losses_N(adapted, side)
        return weighted_sum(losses_N, side.layout.mean_weights_N(losses_N.dtype))

    def _gated(self, seen: RowInputs, layout: RowLayout) -> dict[str, tuple[nn.Linear, Tensor]]:
        """Every gated layer with the gates that the seen rows ask for, by name."""
        if not isinstance(self._model, GatedModel):
            return {}
        inputs_NX = self._model.seen_NX(seen)
        gates = self._model.gates_TO(layout.mean_TX(inputs_NX))
        return {name: (self._row_layers[name], gate_TO) for name, gate_TO in gates.items()}

    def _step(
        self,
        adapted: Adapted,
        rate: float | Tensor,
        support: Side,
        second_order: bool,
        keep_path: bool,
    ) -> Adapted:
        """One inner step for all tasks at once."""
        adapts_rows = self.config.adapt_embeddings
        before_PD = adapted.rows_PD
        # A view: the step's gradient must not see what the same rows do elsewhere, in the gates.
        rows_PD = before_PD.view_as(before_PD) if second_order or keep_path else before_PD.detach()
        if adapts_rows and not rows_PD.requires_grad:
            rows_PD.requires_grad_()
        with adapted.layers.applied(support.layout) as tape:
            output_N = self._model(support.inputs(rows_PD))
        # The tasks share no adapted value, so the gradient of the sum is every task's own gradient.
        losses_N = row_losses_N(self._loss, output_N, support.label_N)
        prior = self.config.support_prior
        loss_sum = weighted_sum(losses_N, support.layout.mean_weights_N(losses_N.dtype, prior))
        wanted = [*tape.outputs, rows_PD] if adapts_rows else tape.outputs
        grads = torch.autograd.grad(
            loss_sum, wanted, create_graph=second_order, retain_graph=second_order or keep_path
        )
        if not second_order:
            tape.inputs = [seen.detach() for seen in tape.inputs]
        adapted.layers.step(tape, grads[: len(tape.outputs)])
        return replace(
            adapted,
            rows_PD=before_PD - rate * grads[-1] if adapts_rows else before_PD,
            support_loss_sums=(*adapted.support_loss_sums, loss_sum),
        )
