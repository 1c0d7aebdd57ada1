"""The inner loop where a model's MLPs adapt, in closed form: exact, and a fraction of the
operations of inner_loop.py, which does the same for any model.

It serves training where it can (`suits`); else, and for predictions, the general loop runs. Both
are tested against the same loop over tasks, and against each other. Where no step moves what the
decision layers see, fixed_inputs.py does all of it in one operation; where embedding rows adapt, or
layers over the dense columns, fused_steps.py takes one step after the other.

Shape suffixes: N rows of one side, M query rows, R rows of both sides, P distinct (task, row)
pairs, O output width.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from gmeta.adaptation.blocks import BlockRows, BlockSide, StackedBlocks, TaskBlocks
from gmeta.adaptation.common import CommonFeatures, CommonInputs, first_layer
from gmeta.adaptation.config import AlgorithmConfig
from gmeta.adaptation.costs import PathCosts
from gmeta.adaptation.fixed_inputs import query_loss_sum
from gmeta.adaptation.fixed_state import FixedLoop
from gmeta.adaptation.fused_steps import SteppedLoop, in_autocast, linear_layers
from gmeta.adaptation.inner_loop import WorkingRows
from gmeta.adaptation.linear import adaptable_layers
from gmeta.adaptation.paths import Path, cheaper_path, paths_of_layers
from gmeta.adaptation.rates import InnerRates, WeightRates
from models.config import Pooling
from models.decision import DecisionModel
from models.gated import GatedModel


class FusedLoop:
    """k SGD steps on every task's support set and the query loss after them; owns no parameters."""

    def __init__(
        self, model: DecisionModel, config: AlgorithmConfig, loss: str, rates: InnerRates
    ) -> None:
        self._model = model
        self._config = config
        self._loss = loss
        self._rates = rates
        adapts = adaptable_layers(model, config.adapt_layers)
        names: dict[nn.Module, str] = {layer: name for name, layer in adapts.items()}
        self._layers = linear_layers(model.decision_layers)
        # None: the layer does not adapt.
        self._names = [names.get(layer) for layer in self._layers]
        self._path_of = paths_of_layers(config, list(adapts))
        # Whether inner steps move what the decision layers see; asked several times a step.
        self.moves_inputs = _moves_inputs(model, config)
        self._stepped = SteppedLoop(model, config, loss, rates, names)

    @property
    def pooling(self) -> Pooling:
        """How the model pools."""
        return self._model.pooling

    @property
    def history(self) -> int | None:
        """The multi-id feature that the model sees unpooled."""
        return self._model.history

    @property
    def splits_weights(self) -> int:
        """Weights of the first layer where what all rows of a task share may be taken once a task
        (common.py), else 0.
        """
        may_split = self._model.features_from is not None and not self.moves_inputs
        return self._layers[0].weight.numel() if may_split else 0

    @staticmethod
    def suits(
        model: nn.Module, config: AlgorithmConfig, rates: InnerRates, second_order: bool
    ) -> bool:
        """Whether what adapts is decision layers, at no rate of single weights, layers over the
        dense columns and embedding rows; where none of the latter does, rates that learn need the
        second order.
        """
        if not isinstance(model, DecisionModel):
            return False
        adapts = adaptable_layers(model, config.adapt_layers)
        moves_inputs = _moves_inputs(model, config)
        found = [rates.of_layer(name) for name in adapts]
        if not (moves_inputs or second_order) and any(isinstance(rate, Tensor) for rate in found):
            return False  # fixed_inputs.py takes the inner gradients for constants, rates and all
        inside = linear_layers(model.decision_layers) + linear_layers(model.dense_layers)
        return all(layer in inside for layer in adapts.values()) and not any(
            isinstance(rate, WeightRates) for rate in found
        )

    def loss_sum(
        self, rows: WorkingRows, blocks: TaskBlocks | StackedBlocks, second_order: bool
    ) -> Tensor:
        """Sum over the tasks of the mean query loss at the parameters that k inner steps make.

        Differentiable through the inner gradients with `second_order`, else they are constants.
        """
        if isinstance(blocks, StackedBlocks):
            return self._stacked_loss_sum(rows.values_PD, blocks)
        if not self.moves_inputs:
            return self._first_order_loss_sum(rows.values_PD, blocks)
        gates: list[Tensor | None] = [None] * len(self._layers)
        if isinstance(self._model, GatedModel):
            support = blocks.support
            gates = self._gates_TO(self._inputs_NX(rows.values_PD, support), support.rows)
        return self._stepped.loss_sum(rows, blocks, gates, second_order)

    def _stacked_loss_sum(self, rows_PD: Tensor, blocks: StackedBlocks) -> Tensor:
        """Second order, embedding rows fixed."""
        inputs_RX = self._inputs_NX(rows_PD, blocks.both)
        common = self._common(rows_PD, blocks.common)
        support, query = blocks.support, blocks.query
        gates_RO: list[Tensor | None] = [None] * len(self._layers)
        if isinstance(self._model, GatedModel):
            support_NX = inputs_RX[: support.label_N.numel()]
            gates_RO = self._gates_RO(support_NX, support, blocks.both.rows.task_N, common)
        return self._fixed_loss_sum(inputs_RX, None, support, query, gates_RO, common)

    def _first_order_loss_sum(self, rows_PD: Tensor, blocks: TaskBlocks) -> Tensor:
        """First order, embedding rows fixed: the support rows' inputs are constants, but for the
        gates.
        """
        gated, (support, query) = isinstance(self._model, GatedModel), blocks.rows
        with torch.set_grad_enabled(gated):
            support_NX = self._inputs_NX(rows_PD, blocks.support)
        inputs_MX = self._inputs_NX(rows_PD, blocks.query)
        common = self._common(rows_PD, blocks.common)
        gates_RO: list[Tensor | None] = [None] * len(self._layers)
        if gated:
            task_R = torch.cat([support.task_N, query.task_N])
            gates_RO = self._gates_RO(support_NX, support, task_R, common)
        return self._fixed_loss_sum(
            inputs_MX, support_NX.detach(), support, query, gates_RO, common
        )

    def _common(self, rows_PD: Tensor, features: CommonFeatures | None) -> CommonInputs | None:
        """What the rows of a task share, in the precision of their other inputs."""
        if features is None:
            return None
        first_column = self._model.features_from
        assert first_column is not None  # or nothing would stand apart
        columns = features.columns(first_column, rows_PD.shape[1], self._layers[0].weight)
        return CommonInputs(features, columns, in_autocast(features.values_TU(rows_PD)))

    def _fixed_loss_sum(
        self,
        inputs: Tensor,
        support_NX: Tensor | None,
        support: BlockRows,
        query: BlockRows,
        gates_RO: Sequence[Tensor | None],
        common: CommonInputs | None,
    ) -> Tensor:
        """See FixedLoop."""
        dtype, second_order = inputs.dtype, support_NX is None
        weights = [layer.weight.to(dtype) for layer in self._layers]
        biases = [layer.bias.to(dtype) for layer in self._layers]
        common_T = task_of_row = support_bias_NO = None
        if common is not None:
            weights[0], biases[0], common_T = first_layer(
                weights[0], biases[0], common, second_order
            )
            *of_support, task_of_row = common.features.of_rows
            if of_support:
                support_bias_NO = of_support[0].forward.times(biases[0])
        # `suits` refused rates of single weights.
        rates = [
            cast(float | Tensor, 0.0 if name is None else self._rates.of_layer(name))
            for name in self._names
        ]
        loop = FixedLoop(
            steps=self._config.inner_steps,
            loss=self._loss,
            support_prior=self._config.support_prior,
            support=support,
            query=query,
            paths=self._paths(support, query, weights),
            rates=tuple(rate.to(dtype) if isinstance(rate, Tensor) else rate for rate in rates),
            gated=tuple(gate is not None for gate in gates_RO),
            support_NX=support_NX,
            task_of_row=task_of_row,
            support_bias_NO=support_bias_NO,
        )
        gates = [gate.to(dtype) for gate in gates_RO if gate is not None]
        return query_loss_sum(loop, inputs, weights, biases, gates, common_T)

    def _paths(
        self, support: BlockRows, query: BlockRows, weights_OI: Sequence[Tensor]
    ) -> tuple[tuple[Path, ...], ...]:
        """How each layer's change is held in each rectangle; none where it does not adapt."""
        costs = [
            (mine.tasks, PathCosts(mine.rows, other.rows, self._config.inner_steps))
            for mine, other in zip(support.rectangles, query.rectangles, strict=True)
        ]
        widths = [(weight.shape[1], weight.shape[0]) for weight in weights_OI]
        return tuple(
            ()
            if name is None
            else tuple(
                cheaper_path(tasks, cost, *width, at == 0, self._path_of[name])
                for tasks, cost in costs
            )
            for at, (name, width) in enumerate(zip(self._names, widths, strict=True))
        )

    def _gates_TO(
        self, support_NX: Tensor, support: BlockRows, common: CommonInputs | None = None
    ) -> list[Tensor | None]:
        """The gate of each decision layer of a gated model, for every task; None where it has
        none.
        """
        mean_TX = support.mean_TX(support_NX)
        if common is not None:
            is_known_T1 = support.mean_TX(support_NX.new_ones(len(support_NX), 1))
            mean_TX = common.beside(mean_TX, common.values_TU * is_known_T1)
        gates = cast(GatedModel, self._model).gates_TO(mean_TX)
        by_layer = {self._model.get_submodule(name): gate for name, gate in gates.items()}
        return [by_layer.get(layer) for layer in self._layers]

    def _gates_RO(
        self,
        support_NX: Tensor,
        support: BlockRows,
        task_R: Tensor,
        common: CommonInputs | None,
    ) -> list[Tensor | None]:
        """The same for rows of these tasks."""
        gates_TO = self._gates_TO(support_NX, support, common)
        return [gate if gate is None else gate.index_select(0, task_R) for gate in gates_TO]

    def _inputs_NX(self, rows_PD: Tensor, side: BlockSide) -> Tensor:
        """What the decision layers see of rows whose dense layers do not adapt."""
        features = self._model.through_dense(side.features(rows_PD))
        return in_autocast(self._model.decision_inputs_NX(features))


def _moves_inputs(model: DecisionModel, config: AlgorithmConfig) -> bool:
    adapts = adaptable_layers(model, config.adapt_layers).values()
    return config.adapt_embeddings or not set(adapts).isdisjoint(linear_layers(model.dense_layers))
