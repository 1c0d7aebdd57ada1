"""The inner loop where decision layers adapt, in closed form: exact, and a fraction of the
operations of inner_loop.py, which does the same for any model.

It serves training where it can (`suits`) and pays (`pays`); else, and for predictions, the general
loop runs. Both are tested against the same loop over tasks, and against each other.

Shape suffixes: N rows of one side, P distinct (task, row) pairs, D embedding width, O output width.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from gmeta.adaptation.blocks import BlockGroup, BlockSide, TaskBlocks
from gmeta.adaptation.config import AlgorithmConfig
from gmeta.adaptation.fused_mlp import AdaptedMlp, Factors
from gmeta.adaptation.inner_loop import WorkingRows, row_losses_N
from gmeta.adaptation.linear import PathCosts, adaptable_layers
from gmeta.adaptation.rates import InnerRates, WeightRates
from models.decision import DecisionModel
from models.gated import GatedModel
from models.inputs import Pooling


class _Fixed(NamedTuple):
    """What no inner step changes on the support rows where embeddings do not adapt."""

    inputs_NX: Tensor
    # What the first decision layer gives before it is gated and adapts; None where one step alone
    # would use it, and it would only take memory.
    first_NO: Tensor | None


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
        names = {layer: name for name, layer in adapts.items()}
        self._layers = _linear_layers(model)
        # None: the layer does not adapt.
        self._names = [names.get(layer) for layer in self._layers]
        # The gradients below this layer's output are no factors, and so not needed.
        lowest = [at for at, name in enumerate(self._names, 1) if name is not None]
        self._lowest = 0 if config.adapt_embeddings else lowest[0]

    @property
    def pooling(self) -> Pooling:
        """How the model pools."""
        return self._model.pooling

    @property
    def history(self) -> int | None:
        """The multi-id feature that the model sees unpooled."""
        return self._model.history

    @staticmethod
    def suits(model: nn.Module, config: AlgorithmConfig, rates: InnerRates) -> bool:
        """Whether what adapts is decision layers, with changes of low rank, and embedding rows."""
        if not isinstance(model, DecisionModel) or config.inner_path == "materialised":
            return False
        adapts = adaptable_layers(model, config.adapt_layers)
        inside = _linear_layers(model)
        return all(
            layer in inside and not isinstance(rates.of_layer(name), WeightRates)
            for name, layer in adapts.items()
        )

    def pays(self, groups: Iterable[BlockGroup]) -> bool:
        """Whether low rank is the cheaper path for these tasks, all layers together."""
        low_rank = materialised = 0
        for tasks, support_rows, query_rows in groups:
            costs = PathCosts(support_rows, query_rows, self._config.inner_steps)
            for at, (layer, name) in enumerate(zip(self._layers, self._names, strict=True)):
                if name is None:
                    continue
                width = layer.in_features, layer.out_features
                fixed = at == 0 and not self._config.adapt_embeddings
                low = costs.low_rank_of_fixed(*width) if fixed else costs.low_rank(*width, uses=1)
                low_rank += len(tasks) * low
                materialised += len(tasks) * costs.materialised(*width, uses=1)
        return self._config.inner_path == "low_rank" or low_rank <= materialised

    def loss_sum(self, rows: WorkingRows, blocks: TaskBlocks, second_order: bool) -> Tensor:
        """Sum over the tasks of the mean query loss at the parameters that k inner steps make.

        Differentiable through the inner gradients with `second_order`, else they are constants.
        """
        rows_PD, query = rows.values_PD, blocks.query
        gates = self._gates_TO(rows_PD, blocks.support)
        factors: list[tuple[Factors, ...]] = [()] * len(self._layers)
        fixed = None
        if not self._config.adapt_embeddings:
            fixed = self._fixed(rows_PD, blocks.support, second_order)
        for _ in range(self._config.inner_steps):
            factors, row_grads_PD = self._step(
                rows_PD, fixed, gates, factors, blocks.support, second_order
            )
            if row_grads_PD is not None:
                rows_PD = rows_PD - rows.rate * row_grads_PD
        inputs_NX = self._inputs_NX(rows_PD, query)
        mlp = self._mlp(gates, factors, blocks.support, inputs_NX.dtype)
        output_NO = mlp.outputs(inputs_NX, query.rectangles)[-1]
        return self._weighted_loss(output_NO, query, 0.0)

    def _fixed(self, rows_PD: Tensor, support: BlockSide, second_order: bool) -> _Fixed:
        with torch.set_grad_enabled(second_order):
            inputs_NX = self._inputs_NX(rows_PD, support)
            if self._config.inner_steps == 1:
                return _Fixed(inputs_NX, None)
            first = self._layers[0]
            weight_OX, bias_O = (value.to(inputs_NX.dtype) for value in (first.weight, first.bias))
            return _Fixed(inputs_NX, torch.addmm(bias_O, inputs_NX, weight_OX.mT))

    def _step(
        self,
        rows_PD: Tensor,
        fixed: _Fixed | None,
        gates: Sequence[Tensor | None],
        factors: Sequence[tuple[Factors, ...]],
        support: BlockSide,
        second_order: bool,
    ) -> tuple[list[tuple[Factors, ...]], Tensor | None]:
        """The factors with one inner step more, and the gradient of the rows where these adapt."""
        if fixed is None:
            if not second_order or not rows_PD.requires_grad:
                rows_PD = rows_PD.detach().requires_grad_()
            inputs_NX, first_NO = self._inputs_NX(rows_PD, support), None
        else:
            inputs_NX, first_NO = fixed
        with torch.set_grad_enabled(second_order):
            seen_NX = inputs_NX if second_order else inputs_NX.detach()
            mlp = self._mlp(gates, factors, support, seen_NX.dtype)
            *hidden, output_NO = mlp.outputs(seen_NX, support.rectangles, first_NO)
        with torch.enable_grad():
            if not output_NO.requires_grad:
                output_NO = output_NO.detach().requires_grad_()
            loss = self._weighted_loss(output_NO, support, self._config.support_prior)
            (last,) = torch.autograd.grad(loss, output_NO, create_graph=second_order)
        with torch.set_grad_enabled(second_order):
            grads = mlp.grads(last, hidden, self._lowest)
            moved = list(factors)
            for at, name in enumerate(self._names):
                if name is not None:
                    activations = hidden[at - 1] if at else seen_NX
                    # `suits` refused rates of single weights.
                    rate = cast(float | Tensor, self._rates.of_layer(name))
                    scaled = grads[at + 1 - self._lowest] * rate
                    if at == 0 and fixed is not None and factors[at]:
                        # Equal activations in every step: (x A^T + 1) (G_1 + G_2 + ...).
                        (before,) = factors[at]
                        moved[at] = (Factors(activations, before.scaled_grads_SO + scaled),)
                    else:
                        moved[at] = (*factors[at], Factors(activations, scaled))
        row_grads_PD = None
        if fixed is None:
            (row_grads_PD,) = torch.autograd.grad(
                inputs_NX, rows_PD, grads[0], create_graph=second_order
            )
        return moved, row_grads_PD

    def _gates_TO(self, rows_PD: Tensor, support: BlockSide) -> list[Tensor | None]:
        """The gate of each decision layer, for every task; None where it has none."""
        if not isinstance(self._model, GatedModel):
            return [None] * len(self._layers)
        gates = self._model.gates_TO(support.mean_TX(self._inputs_NX(rows_PD, support)))
        by_layer = {self._model.get_submodule(name): gate for name, gate in gates.items()}
        return [by_layer.get(layer) for layer in self._layers]

    def _mlp(
        self,
        gates: Sequence[Tensor | None],
        factors: Sequence[tuple[Factors, ...]],
        support: BlockSide,
        dtype: torch.dtype,
    ) -> AdaptedMlp:
        return AdaptedMlp(
            [layer.weight.to(dtype) for layer in self._layers],
            [layer.bias.to(dtype) for layer in self._layers],
            [None if gate is None else gate.to(dtype) for gate in gates],
            factors,
            support.rectangles,
        )

    def _inputs_NX(self, rows_PD: Tensor, side: BlockSide) -> Tensor:
        """What the decision layers see, in autocast's precision where that is on: the operations
        with written-out derivatives are closed to autocast.
        """
        inputs_NX = self._model.decision_inputs_NX(side.features(rows_PD))
        device = inputs_NX.device.type
        if torch.is_autocast_enabled(device):
            inputs_NX = inputs_NX.to(torch.get_autocast_dtype(device))
        return inputs_NX

    def _weighted_loss(self, output_NO: Tensor, side: BlockSide, prior: float) -> Tensor:
        """Sum over the tasks of the (shrunken) mean loss of their rows: a scalar."""
        output_N = output_NO.squeeze(1)
        if output_N.dtype in (torch.bfloat16, torch.float16):
            output_N = output_N.float()
        losses_N = row_losses_N(self._loss, output_N, side.label_N)
        return losses_N @ side.mean_weights_N(losses_N.dtype, prior)


def _linear_layers(model: DecisionModel) -> list[nn.Linear]:
    return [layer for layer in model.decision_layers if isinstance(layer, nn.Linear)]
