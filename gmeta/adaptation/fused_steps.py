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
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gmeta.adaptation.costs import PathCosts
from gmeta.adaptation.fused_mlp import AdaptedMlp
from gmeta.adaptation.paths import cheaper_path, paths_of_layers
from gmeta.adaptation.rates import FixedRates
from gmeta.adaptation.thin_products import Taken

if TYPE_CHECKING:
    from gmeta.adaptation.blocks import BlockRows, BlockSide, TaskBlocks
    from gmeta.adaptation.config import AlgorithmConfig, InnerPath
    from gmeta.adaptation.inner_loop import WorkingRows
    from gmeta.adaptation.losses import RowLoss
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
        paths = paths_of_layers(config, list(names.values()))
        self._decision = _Layers.of(model.decision_layers, names, paths)
        dense = _Layers.of(model.dense_layers, names, paths)
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
        dtype = _precision(rows.values_PD)
        costs = [
            (mine.tasks, PathCosts(mine.rows, other.rows, self._config.inner_steps))
            for mine, other in zip(support.rows.rectangles, query.rows.rectangles, strict=True)
        ]
        adapted = _Adapted(
            rows.values_PD,
            self._decision.mlp(dtype, gates, support.rows, costs),
            None if self._dense is None else self._dense.mlp(dtype, (), support.rows, costs),
        )
        loss = support.rows.row_loss(self._loss, dtype, self._config.support_prior, self._rate)
        fixed: RowFeatures | None = None
        if not self._config.adapt_embeddings:
            fixed = support.features(rows.values_PD if second_order else rows.values_PD.detach())
        for _ in range(self._config.inner_steps):
            adapted = self._step(adapted, rows.rate, support, fixed, loss, second_order)
        features, dense_NO = query.features(adapted.rows_PD), None
        if adapted.dense is not None:
            dense_NK = in_autocast(features.dense_NK)
            *_, dense_NO = adapted.dense.outputs(dense_NK, query.rows.rectangles)
        inputs_NX = self._inputs_NX(features, dense_NO)
        loss = query.rows.row_loss(self._loss, dtype)
        return adapted.decision.loss(inputs_NX, query.rows.rectangles, loss)

    def _step(
        self,
        adapted: _Adapted,
        rate: float | Tensor,
        support: BlockSide,
        fixed: RowFeatures | None,
        loss: RowLoss,
        second_order: bool,
    ) -> _Adapted:
        """After one inner step more. `fixed` are the features of rows that do not adapt."""
        rows_PD, decision, dense = adapted.rows_PD, adapted.decision, adapted.dense
        if fixed is None and not (second_order and rows_PD.requires_grad):
            rows_PD = rows_PD.detach().requires_grad_()
        features = support.features(rows_PD) if fixed is None else fixed
        rectangles = support.rows.rectangles
        moving, dense_NO = [rows_PD] if fixed is None else [], None
        if dense is not None:
            with torch.set_grad_enabled(second_order):
                dense_NK = in_autocast(features.dense_NK)
                *hidden, dense_NO = dense.outputs(dense_NK, rectangles)
            dense_seen = [dense_NK, *hidden]
            if not dense_NO.requires_grad:
                dense_NO.requires_grad_()
            moving.append(dense_NO)
        inputs_NX = self._inputs_NX(features, dense_NO)
        with torch.set_grad_enabled(second_order):
            seen_NX = inputs_NX if second_order else inputs_NX.detach()
            seen, (of_inputs_NX, *grads) = decision.step(seen_NX, loss)
        found = torch.autograd.grad(inputs_NX, moving, of_inputs_NX, create_graph=second_order)
        rates = self._rates if self._rate is None else None
        after = replace(adapted, decision=self._decision.after(decision, seen, grads, rates))
        if fixed is None:
            change_PD = found[0] if self._rate is not None else rate * found[0]
            after = replace(after, rows_PD=adapted.rows_PD - change_PD)
        if dense is not None and self._dense is not None:
            lowest = self._dense.lowest_adapting
            with torch.set_grad_enabled(second_order):
                dense_grads = dense.grads(found[-1], dense_seen[1:], lowest + 1)
            after_it = self._dense.after(dense, dense_seen, dense_grads, rates)
            after = replace(after, dense=after_it)
        return after

    def _inputs_NX(self, features: RowFeatures, dense_NO: Tensor | None) -> Tensor:
        """What the decision layers see, of rows whose dense layers gave this if they adapt."""
        if dense_NO is None:
            features = self._model.through_dense(features)
        else:
            features = features._replace(dense_NK=dense_NO.relu())
        return in_autocast(self._model.decision_inputs_NX(features)).contiguous()


@dataclass(frozen=True)
class _Adapted:
    """What the inner steps so far made of a model, for every task."""

    rows_PD: Tensor
    decision: AdaptedMlp
    dense: AdaptedMlp | None


@dataclass(frozen=True)
class _Layers:
    """Linear layers with ReLU between them, and which of them adapt."""

    layers: tuple[nn.Linear, ...]
    names: tuple[str | None, ...]  # None: it does not adapt
    paths: tuple[InnerPath, ...]

    @classmethod
    def of(
        cls,
        layers: nn.Sequential | None,
        names: Mapping[nn.Module, str],
        paths: Mapping[str, InnerPath],
    ) -> _Layers:
        found = linear_layers(layers)
        mine = tuple(map(names.get, found))
        return cls(found, mine, tuple(paths.get(name or "", "auto") for name in mine))

    @property
    def lowest_adapting(self) -> int:
        """Counted from the inputs."""
        return next(at for at, name in enumerate(self.names) if name is not None)

    def mlp(
        self,
        dtype: torch.dtype,
        gates: Sequence[Tensor | None],
        support: BlockRows,
        costs: Sequence[tuple[int, PathCosts]],
    ) -> AdaptedMlp:
        """Before the first inner step. The costs are of the tasks of each rectangle."""
        taken = []
        for layer, path in zip(self.layers, self.paths, strict=True):
            width = layer.in_features, layer.out_features
            held = [cheaper_path(tasks, of, *width, False, path) for tasks, of in costs]
            thin = tuple(at for at, way in enumerate(held) if way == "low_rank")
            full = tuple(at for at, way in enumerate(held) if way != "low_rank")
            taken.append(Taken(thin, full))
        return AdaptedMlp(
            [layer.weight.to(dtype) for layer in self.layers],
            [layer.bias.to(dtype) for layer in self.layers],
            [None if gate is None else gate.to(dtype) for gate in gates]
            or [None] * len(self.layers),
            taken,
            support.rectangles,
        )

    def after(
        self,
        mlp: AdaptedMlp,
        seen: Sequence[Tensor],
        grads: Sequence[Tensor],
        rates: InnerRates | None,
    ) -> AdaptedMlp:
        """With one inner step more, from what the layers saw and the gradients at the outputs of
        the last of them; without rates they carry them already.
        """
        taken = list(mlp.taken)
        for at, name in enumerate(self.names):
            if name is not None:
                scaled = grads[at - len(self.names)]
                if rates is not None:
                    # `suits` refused rates of single weights.
                    scaled = scaled * cast(float | Tensor, rates.of_layer(name))
                taken[at] = taken[at].then(seen[at], scaled, mlp.support)
        return replace(mlp, taken=taken)


def linear_layers(layers: nn.Sequential | None) -> tuple[nn.Linear, ...]:
    """In their order; none of None."""
    return tuple(layer for layer in layers or () if isinstance(layer, nn.Linear))


def in_autocast(rows_NI: Tensor) -> Tensor:
    """In autocast's precision where that is on: operations with written-out derivatives are closed
    to autocast.
    """
    return rows_NI.to(_precision(rows_NI))


def _precision(rows: Tensor) -> torch.dtype:
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
