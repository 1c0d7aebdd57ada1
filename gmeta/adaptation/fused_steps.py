"""The inner loop one step after the other, where its steps move what the decision layers see:
embedding rows adapt, or layers over the dense columns.

A pass goes through the layers over the dense columns, the model's features and the decision layers.
fused_mlp.py does the layers; what is between them is autograd's, which in one call takes the
gradient of the decision layers' inputs to the rows and to what the dense layers gave.

Shape suffixes: N rows of one side, P distinct (task, row) pairs, D embedding width, I input width,
O output width, X inputs of the decision layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from gmeta.adaptation.fused_mlp import AdaptedMlp
from gmeta.adaptation.losses import HALVES, row_losses_N, row_slopes_N, weighted_sum
from gmeta.adaptation.rates import FixedRates
from gmeta.adaptation.thin_products import Factors

if TYPE_CHECKING:
    from gmeta.adaptation.blocks import BlockRows, BlockSide, TaskBlocks
    from gmeta.adaptation.config import AlgorithmConfig
    from gmeta.adaptation.inner_loop import WorkingRows
    from gmeta.adaptation.rates import InnerRates
    from models.decision import DecisionModel
    from models.inputs import RowFeatures


class SteppedLoop:
    """k SGD steps on every task's support set and the query loss after them; owns no parameters.

    `names` are those of the layers that adapt.
    """

    def __init__(
        self,
        model: DecisionModel,
        config: AlgorithmConfig,
        loss: str,
        rates: InnerRates,
        names: Mapping[nn.Module, str],
    ) -> None:
        self._model = model
        self._config = config
        self._loss = loss
        self._rates = rates
        # One rate for everything scales the loss whose gradients all steps take.
        self._rate = rates.rate if isinstance(rates, FixedRates) else None
        self._decision = _Layers.of(model.decision_layers, names)
        dense = _Layers.of(model.dense_layers, names)
        # None: no such layer adapts, and autograd does them with the rest.
        self._dense = dense if any(dense.names) else None

    def loss_sum(
        self,
        rows: WorkingRows,
        blocks: TaskBlocks,
        gates: Sequence[Tensor | None],
        second_order: bool,
    ) -> Tensor:
        """Sum over the tasks of the mean query loss at the parameters that k inner steps make of
        decision layers with these gates.
        """
        support, query = blocks.support, blocks.query
        decision = replace(self._decision, gates=tuple(gates))
        adapted = _Adapted(rows.values_PD, decision, self._dense)
        fixed: RowFeatures | None = None
        if not self._config.adapt_embeddings:
            fixed = support.features(rows.values_PD if second_order else rows.values_PD.detach())
        for _ in range(self._config.inner_steps):
            adapted = self._step(adapted, rows.rate, support, fixed, second_order)
        features = query.features(adapted.rows_PD)
        inputs_NX = self._inputs_NX(features, adapted.dense_pass(features, query, support))
        output_NO = adapted.decision.seen(inputs_NX, query, support).last_NO
        return self._weighted_loss(output_NO, query.rows, 0.0)

    def _step(
        self,
        adapted: _Adapted,
        rate: float | Tensor,
        support: BlockSide,
        fixed: RowFeatures | None,
        second_order: bool,
    ) -> _Adapted:
        """After one inner step more. `fixed` are the features of rows that do not adapt."""
        rows_PD, rates = adapted.rows_PD, self._rates if self._rate is None else None
        if fixed is None and not (second_order and rows_PD.requires_grad):
            rows_PD = rows_PD.detach().requires_grad_()
        features = support.features(rows_PD) if fixed is None else fixed
        with torch.set_grad_enabled(second_order):
            dense = adapted.dense_pass(features, support, support)
        if dense is not None and not dense.last_NO.requires_grad:
            dense.last_NO.requires_grad_()
        inputs_NX = self._inputs_NX(features, dense)
        with torch.set_grad_enabled(second_order):
            seen_NX = inputs_NX if second_order else inputs_NX.detach()
            decision = adapted.decision.seen(seen_NX, support, support)
            last_NO = self._loss_grad_NO(decision.last_NO, support.rows)
            grads = decision.mlp.grads(last_NO, decision.hidden)
        moving = [rows_PD] if fixed is None else []
        moving += [] if dense is None else [dense.last_NO]
        found = torch.autograd.grad(inputs_NX, moving, grads[0], create_graph=second_order)
        after = replace(adapted, decision=adapted.decision.after(decision, grads, rates))
        if fixed is None:
            change_PD = found[0] if self._rate is not None else rate * found[0]
            after = replace(after, rows_PD=adapted.rows_PD - change_PD)
        if adapted.dense is not None and dense is not None:
            lowest = adapted.dense.lowest_adapting
            with torch.set_grad_enabled(second_order):
                grads = dense.mlp.grads(found[-1], dense.hidden, lowest + 1)
            after = replace(after, dense=adapted.dense.after(dense, grads, rates))
        return after

    def _inputs_NX(self, features: RowFeatures, dense: _Pass | None) -> Tensor:
        """What the decision layers see, of rows whose dense layers gave this."""
        if dense is None:
            features = self._model.through_dense(features)
        else:
            features = features._replace(dense_NK=dense.last_NO.relu())
        return in_autocast(self._model.decision_inputs_NX(features))

    def _loss_grad_NO(self, output_NO: Tensor, side: BlockRows) -> Tensor:
        """The gradient of the support loss at the outputs, times the rate if all share one."""
        scores_N = output_NO.squeeze(1)
        if scores_N.dtype in HALVES:
            scores_N = scores_N.float()
        slopes_N = row_slopes_N(self._loss, scores_N, side.label_N)
        weights_N = side.mean_weights_N(scores_N.dtype, self._config.support_prior)
        if self._rate is not None:
            weights_N = weights_N * self._rate
        return (slopes_N * weights_N).to(output_NO.dtype).unsqueeze(1)

    def _weighted_loss(self, output_NO: Tensor, side: BlockRows, prior: float) -> Tensor:
        """Sum over the tasks of the (shrunken) mean loss of their rows: a scalar."""
        losses_N = row_losses_N(self._loss, output_NO.squeeze(1), side.label_N)
        return weighted_sum(losses_N, side.mean_weights_N(losses_N.dtype, prior))


class _Pass(NamedTuple):
    """Layers as they are adapted so far, what they saw of some rows, and what they gave."""

    mlp: AdaptedMlp
    inputs_NI: Tensor
    hidden: Sequence[Tensor]
    last_NO: Tensor


@dataclass(frozen=True)
class _Layers:
    """Linear layers with ReLU between them, and what the inner steps so far took from each."""

    layers: tuple[nn.Linear, ...]
    names: tuple[str | None, ...]  # None: it does not adapt
    gates: tuple[Tensor | None, ...]
    factors: tuple[tuple[Factors, ...], ...]

    @classmethod
    def of(cls, layers: nn.Sequential | None, names: Mapping[nn.Module, str]) -> _Layers:
        found = linear_layers(layers)
        none = [None] * len(found)
        return cls(found, tuple(map(names.get, found)), tuple(none), tuple(() for _ in found))

    @property
    def lowest_adapting(self) -> int:
        """Counted from the inputs."""
        return next(at for at, name in enumerate(self.names) if name is not None)

    def seen(self, rows_NI: Tensor, side: BlockSide, support: BlockSide) -> _Pass:
        """These rows of a side go through, adapted."""
        rows_NI = in_autocast(rows_NI)
        dtype = rows_NI.dtype
        mlp = AdaptedMlp(
            [layer.weight.to(dtype) for layer in self.layers],
            [layer.bias.to(dtype) for layer in self.layers],
            [None if gate is None else gate.to(dtype) for gate in self.gates],
            self.factors,
            support.rows.rectangles,
        )
        *hidden, last_NO = mlp.outputs(rows_NI, side.rows.rectangles)
        return _Pass(mlp, rows_NI, hidden, last_NO)

    def after(self, seen: _Pass, grads: Sequence[Tensor], rates: InnerRates | None) -> _Layers:
        """With one inner step more, from the gradients at the outputs of the last layers; without
        rates they carry them already.
        """
        factors = list(self.factors)
        for at, name in enumerate(self.names):
            if name is not None:
                activations = seen.hidden[at - 1] if at else seen.inputs_NI
                scaled = grads[at - len(self.names)]
                if rates is not None:
                    # `suits` refused rates of single weights.
                    scaled = scaled * cast(float | Tensor, rates.of_layer(name))
                factors[at] = (*factors[at], Factors(activations, scaled))
        return replace(self, factors=tuple(factors))


@dataclass(frozen=True)
class _Adapted:
    """What the inner steps so far made of a model, for every task."""

    rows_PD: Tensor
    decision: _Layers
    dense: _Layers | None

    def dense_pass(
        self, features: RowFeatures, side: BlockSide, support: BlockSide
    ) -> _Pass | None:
        """The dense columns of a side go through their layers, where these adapt."""
        return None if self.dense is None else self.dense.seen(features.dense_NK, side, support)


def linear_layers(layers: nn.Sequential | None) -> tuple[nn.Linear, ...]:
    """In their order; none of None."""
    return tuple(layer for layer in layers or () if isinstance(layer, nn.Linear))


def in_autocast(rows_NI: Tensor) -> Tensor:
    """In autocast's precision where that is on: operations with written-out derivatives are closed
    to autocast.
    """
    device = rows_NI.device.type
    if torch.is_autocast_enabled(device):
        rows_NI = rows_NI.to(torch.get_autocast_dtype(device))
    return rows_NI
