"""The inner loop for models that end in an MLP, over all tasks of a batch at once: exact, and a
fraction of the operations of general_loop.py, which does the same for any model.

Shape suffixes: T tasks, N rows, S support rows, K dense columns, L labels, D embedding width, P
task-row pairs, I inputs, O outputs, X all inputs side by side"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, cast, final

import torch
from torch import Tensor, nn

from gmeta.adaptation.adaptation_plan import TaskSize, linear_layers
from gmeta.adaptation.fused.constant_inputs import FirstLayer, compute_first_outputs
from gmeta.adaptation.fused.mlp import AdaptedMlp
from gmeta.adaptation.layout.common_features import CommonInputs
from gmeta.adaptation.layout.padded_layout import FusedLayout, kind_of_device
from gmeta.adaptation.rates import LayerRate, scale_grads
from gmeta.losses.objectives import RowLoss, known_labels, weigh_rows_N
from gmeta.losses.row_losses import HALVES, in_float32
from gmeta_models.gated import GatedModel
from gmeta_models.mlp import DropoutReLU, dropout_of

if TYPE_CHECKING:
    from gmeta.adaptation.adaptation_plan import AdaptationPlan
    from gmeta.adaptation.fused.constant_inputs import FirstOutputs
    from gmeta.adaptation.layout.padded_layout import PaddedFeatures, PaddedRows, PaddedTasks
    from gmeta.adaptation.layout.sides import WorkingRows
    from gmeta.adaptation.rates import InnerRates
    from gmeta.losses.objectives import LabelLosses, Objectives
    from gmeta_models.decision_model import DecisionModel
    from gmeta_models.inputs import RowFeatures

Adapted = TypeVar("Adapted")


class FusedLoop(ABC, Generic[Adapted]):
    """Takes k SGD steps on every task's support set, and the query loss; owns no parameters."""

    # Which of the two subclasses serves a plan: AdaptationPlan.moves_inputs.
    moves_inputs: ClassVar[bool]

    def __init__(
        self, model: DecisionModel, plan: AdaptationPlan, objectives: Objectives, rates: InnerRates
    ) -> None:
        self.config = plan.config
        self._model = model
        self._plan = plan
        self._objectives = objectives
        self._rates = rates
        names: dict[nn.Module, str] = {layer: name for name, layer in plan.layers.items()}
        self._decision = _LinearStack.of(model.decision_layers, names)
        self._dense = _LinearStack.of(model.dense_layers, names)

    @abstractmethod
    def start(self, rows: WorkingRows, tasks: PaddedTasks, second_order: bool) -> Adapted:
        """Return the model before the first step, at the meta-parameters; with `second_order`
        differentiable through the inner gradients, which are constants otherwise."""

    @abstractmethod
    def step(self, adapted: Adapted, second_order: bool) -> Adapted:
        """Return the model after one more step on every task's support rows."""

    @abstractmethod
    def query_loss_sum(self, adapted: Adapted, tasks: PaddedTasks) -> Tensor:
        """Return the sum over the tasks of the mean query loss at the adapted parameters."""

    def layout(self, second_order: bool, in_buckets: bool = False) -> FusedLayout:
        """Return how batches are laid out for this loop; `in_buckets`: in few shapes."""
        has_constant_inputs, first_weight = not self.moves_inputs, self._decision.layers[0].weight
        gated = isinstance(self._model, GatedModel)
        # An auxiliary loss sees all features of a row.
        is_split = self._model.features_from is not None and not self._model.has_auxiliary
        may_split = has_constant_inputs and is_split
        return FusedLayout(
            pooling=self._model.pooling,
            history=self._model.history,
            rows_per_task=self._plan.adapts_rows,
            # Both sides are differentiated alike: one tensor of both takes half as many operations.
            stacked=has_constant_inputs and second_order,
            # In first order nothing differentiates the support's inputs, but gates learn by them.
            constant_support=not (self._plan.adapts_rows or second_order or gated),
            first_layer_weights=first_weight.numel() if may_split else 0,
            num_weights=self._plan.num_weights,
            device=kind_of_device(self._model),
            dtype=first_weight.dtype,
            in_buckets=in_buckets,
        )

    @property
    def _dropout(self) -> DropoutReLU | None:
        # Of the outer loss alone, as in GeneralLoop.losses_N.
        return dropout_of(self._model.decision_layers) if self._model.training else None

    def _support_loss(self, rows: WorkingRows, tasks: PaddedTasks) -> RowLoss:
        dtype, prior = _precision(rows.values_PD), self.config.support_prior
        return _row_loss(tasks.support, self._objectives.inner, dtype, prior)

    def _gates_TO(
        self, support_SX: Tensor, support: PaddedRows, common: CommonInputs | None
    ) -> list[Tensor | None]:
        mean_TX = support.mean_TX(support_SX)
        if common is not None:
            is_known_T1 = support.mean_TX(support_SX.new_ones(len(support_SX), 1))
            # A gate sees all inputs: those that the rows share are put back, except for a task
            # without rows, whose mean stays 0.
            mean_TX = common.interleave(mean_TX, is_known_T1)
        gates = cast(GatedModel, self._model).gates_TO(mean_TX)
        by_layer = {self._model.get_submodule(name): gate for name, gate in gates.items()}
        return [by_layer.get(layer) for layer in self._decision.layers]

    def _inputs_NX(self, rows_PD: Tensor, features: PaddedFeatures) -> Tensor:
        return self._decision_inputs_NX(self._through_dense(features.values(rows_PD), None))

    def _through_dense(self, features: RowFeatures, dense_NO: Tensor | None) -> RowFeatures:
        """Return rows as the decision inputs are made of them; `dense_NO` are outputs of dense
        layers that adapt."""
        if dense_NO is None:
            return self._model.through_dense(features)
        return features._replace(dense_NK=dense_NO.relu())

    def _decision_inputs_NX(self, seen: RowFeatures) -> Tensor:
        return _in_autocast(self._model.decision_inputs_NX(seen)).contiguous()

    def _auxiliary_sum(self, seen: RowFeatures, tasks: PaddedTasks) -> Tensor | None:
        """Return the sum over the tasks of the mean auxiliary loss of their query rows, which are
        the last of the rows that are `seen`."""
        auxiliary_N = self._model.auxiliary_N(seen) if self._model.has_auxiliary else None
        if auxiliary_N is None:
            return None
        query = tasks.query
        mine_N = in_float32(auxiliary_N)[len(auxiliary_N) - query.num_rows :]
        return torch.dot(weigh_rows_N(mine_N, query.weight), query.mean_weights_N(mine_N.dtype))


@dataclass(frozen=True)
class MovingInputModel:
    """The model in the middle of an inner loop that moves the inputs of its decision layers."""

    rows_PD: Tensor
    rate: float | Tensor  # of the rows
    tasks: PaddedTasks
    support_features: RowFeatures | None  # None: they move, too
    decision: AdaptedMlp
    dense: AdaptedMlp | None  # None: no such layer adapts, and autograd does them with the rest
    loss: RowLoss  # of the support rows


@final
class MovingLoop(FusedLoop[MovingInputModel]):
    """Serves plans in which embedding rows or dense layers adapt: each step sees new inputs."""

    moves_inputs = True

    def start(self, rows: WorkingRows, tasks: PaddedTasks, second_order: bool) -> MovingInputModel:
        """Return the model before the first step."""
        rows_PD, rate = rows.values_PD, rows.rate
        gates: Sequence[Tensor | None] = ()
        if isinstance(self._model, GatedModel):
            support_SX = self._inputs_NX(rows_PD, tasks.features[0])
            gates = self._gates_TO(support_SX, tasks.support, None)
        features: RowFeatures | None = None
        if not self._plan.adapts_rows:
            # Pooled once for all steps: none of them moves the rows.
            features = tasks.features[0].values(rows_PD if second_order else rows_PD.detach())
        return MovingInputModel(
            rows_PD,
            rate.to(rows_PD.dtype) if isinstance(rate, Tensor) else rate,
            tasks,
            features,
            self._decision.mlp(rows_PD, gates, tasks, self._plan),
            self._dense.mlp(rows_PD, (), tasks, self._plan) if self._dense.adapt else None,
            self._support_loss(rows, tasks),
        )

    def step(self, adapted: MovingInputModel, second_order: bool) -> MovingInputModel:
        """Return w - a g, for the weights w of each task and the gradients g of its support loss:
        of embedding rows as it stands, of layers as factors of a g (mlp.py)."""
        w_PD, a, tasks = adapted.rows_PD, adapted.rate, adapted.tasks
        decision, dense, adapts_rows = adapted.decision, adapted.dense, self._plan.adapts_rows
        # A view: the step's gradient must not see what the same rows do elsewhere, in the gates.
        rows_PD = w_PD.view_as(w_PD) if second_order else w_PD.detach()
        # What autograd is to differentiate below the decision layers.
        moving: list[Tensor] = []
        if adapts_rows:
            moving.append(rows_PD if rows_PD.requires_grad else rows_PD.requires_grad_())
        features, dense_NO = adapted.support_features, None
        if features is None:
            features = tasks.features[0].values(rows_PD)
        if dense is not None:
            with torch.set_grad_enabled(second_order):
                *dense_passed, dense_NO = dense.forward(
                    _in_autocast(features.dense_NK), tasks.support
                )
            moving.append(dense_NO if dense_NO.requires_grad else dense_NO.requires_grad_())
        inputs_SX = self._decision_inputs_NX(self._through_dense(features, dense_NO))
        with torch.set_grad_enabled(second_order):
            activations, grads = decision.step_gradients(
                inputs_SX if second_order else inputs_SX.detach(), adapted.loss, lowest=0
            )
        # Below the MLP is any model's own code: from d_0 on, autograd differentiates it, by the
        # rows and by the outputs of the layers over the dense columns.
        below = torch.autograd.grad(inputs_SX, moving, grads[0], create_graph=second_order)
        rates = self._decision.rates(self._rates)
        after = replace(adapted, decision=decision.after_step(activations, grads, rates))
        if adapts_rows:
            g_PD = below[0]
            after = replace(after, rows_PD=w_PD - a * g_PD)
        if dense is not None:
            with torch.set_grad_enabled(second_order):
                dense_grads = dense.gradients(below[-1], dense_passed[1:], dense.lowest_moving)
            rates = self._dense.rates(self._rates)
            after = replace(after, dense=dense.after_step(dense_passed, dense_grads, rates))
        return after

    def query_loss_sum(self, adapted: MovingInputModel, tasks: PaddedTasks) -> Tensor:
        """Return the sum over the tasks of the mean query loss at the adapted parameters."""
        features, dense_NO = tasks.features[1].values(adapted.rows_PD), None
        if adapted.dense is not None:
            dense_NO = adapted.dense.forward(_in_autocast(features.dense_NK), tasks.query)[-1]
        seen = self._through_dense(features, dense_NO)
        inputs_NX = self._decision_inputs_NX(seen)
        outputs_NO = adapted.decision.forward(inputs_NX, tasks.query, self._dropout)[-1]
        loss = _row_loss(tasks.query, self._objectives.outer, outputs_NO.dtype).sum(outputs_NO)
        auxiliary = self._auxiliary_sum(seen, tasks)
        return loss if auxiliary is None else loss + auxiliary


@dataclass(frozen=True)
class ConstantInputMlp:
    """The decision layers in the middle of an inner loop that does not move their inputs."""

    support: FirstOutputs
    query: FirstOutputs
    upper: AdaptedMlp
    first_adapts: bool
    loss: RowLoss  # of the support rows
    rates: list[LayerRate]  # of each layer, the first included
    scaled_grads_SO: Tensor | None = None  # of the first layer's outputs, added up over the steps
    auxiliary: Tensor | None = None  # of the query rows, which no step moves


@final
class StillLoop(FusedLoop[ConstantInputMlp]):
    """Takes the products of the first decision layer once, for all steps: constant_inputs.py."""

    moves_inputs = False

    def start(self, rows: WorkingRows, tasks: PaddedTasks, second_order: bool) -> ConstantInputMlp:
        """Return the decision layers before the first step."""
        rows_PD = rows.values_PD
        gated, constant_SX = isinstance(self._model, GatedModel), None
        if second_order:
            seen = self._through_dense(tasks.features[0].values(rows_PD), None)
            inputs = self._decision_inputs_NX(seen)
            # One tensor holds both sides, the support first: see PaddedTasks.
            support_SX = inputs[: tasks.support.num_rows]
        else:
            # First order: what enters the layers on the support rows is a constant, and a graph of
            # it is kept for the gates alone, which learn by it.
            with torch.set_grad_enabled(gated):
                support_SX = self._inputs_NX(rows_PD, tasks.features[0])
            seen = self._through_dense(tasks.features[1].values(rows_PD), None)
            inputs, constant_SX = self._decision_inputs_NX(seen), support_SX.detach()
        first, *upper = self._decision.layers
        weight_OX, bias = first.weight.to(inputs.dtype), first.bias.to(inputs.dtype)
        common, in_common_T = None, None
        if tasks.common is not None and self._model.features_from is not None:
            column, width = self._model.features_from, first.in_features
            common = CommonInputs.of(tasks.common, rows_PD, column, width)
            common = common._replace(values_TI=_in_autocast(common.values_TI))
            in_common_T = common.shared_product_T(second_order)
            # What all rows of a task share is multiplied once a task, and added to the bias.
            weight_OX, bias = common.split_layer(weight_OX, bias)
        gates: list[Tensor | None] = [None] * len(self._decision.layers)
        if gated:
            gates = self._gates_TO(support_SX, tasks.support, common)
        adapts = self._decision.names[0] is not None
        gate_TO = None if gates[0] is None else gates[0].to(inputs.dtype)
        layer = FirstLayer(weight_OX, bias, in_common_T, gate_TO, adapts)
        steps = self.config.inner_steps
        support, query = compute_first_outputs(layer, inputs, constant_SX, tasks, steps > 1)
        above = _LinearStack(tuple(upper), self._decision.names[1:])
        mlp = above.mlp(rows_PD, gates[1:], tasks, self._plan)
        loss, rates = self._support_loss(rows, tasks), self._decision.rates(self._rates)
        if rate := self._decision.one_rate(rates):
            # A step's gradients are linear in the loss, so its rate can scale the loss, once for
            # all: 2 to 7 % of a step on a CPU, a launch for each layer and inner step on a GPU.
            loss, rates = loss.times(rate), [1.0] * len(rates)
        return ConstantInputMlp(
            support, query, mlp, adapts, loss, rates, auxiliary=self._auxiliary_sum(seen, tasks)
        )

    def step(self, adapted: ConstantInputMlp, second_order: bool) -> ConstantInputMlp:
        """Return w - a g, for the layers' weights w of each task and the gradients g of its support
        loss, as factors of a g (mlp.py); those of the first layer are added up."""
        upper, moved_SO = adapted.upper, adapted.scaled_grads_SO
        with torch.set_grad_enabled(second_order):
            first_SO = adapted.support.after_steps_NO(moved_SO)
            # No gradient is taken below the lowest layer that adapts.
            lowest = 0 if adapted.first_adapts else upper.lowest_moving
            activations, grads = upper.step_gradients(first_SO.relu(), adapted.loss, lowest)
            first_grads_SO = None
            if adapted.first_adapts:
                # Detached: ReLU has no second derivative, and zeros for one would be added up.
                first_grads_SO = torch.ops.aten.threshold_backward(grads[0], first_SO.detach(), 0)
        after = replace(adapted, upper=upper.after_step(activations, grads, adapted.rates[1:]))
        if first_grads_SO is None:
            return after
        # No rate is one of each weight: such a plan takes the general loop.
        scaled_SO = scale_grads(first_grads_SO, cast(float | Tensor, adapted.rates[0]))
        # A is the same in every step, so one product with the sum serves them all.
        return replace(
            after, scaled_grads_SO=scaled_SO if moved_SO is None else moved_SO + scaled_SO
        )

    def query_loss_sum(self, adapted: ConstantInputMlp, tasks: PaddedTasks) -> Tensor:
        """Return the sum over the tasks of the mean query loss at the adapted parameters."""
        inputs_NO = adapted.query.after_steps_NO(adapted.scaled_grads_SO).relu()
        if (dropout := self._dropout) is not None:
            inputs_NO = dropout.drop_out(inputs_NO)
        row_loss = _row_loss(tasks.query, self._objectives.outer, adapted.query.outputs_NO.dtype)
        loss = row_loss.sum(adapted.upper.forward(inputs_NO, tasks.query, dropout)[-1])
        return loss if adapted.auxiliary is None else loss + adapted.auxiliary


@dataclass(frozen=True)
class _LinearStack:
    """Linear layers with ReLU between them, and which of them adapt."""

    layers: tuple[nn.Linear, ...]
    names: tuple[str | None, ...]  # None: it does not adapt

    @classmethod
    def of(cls, layers: nn.Sequential | None, names: dict[nn.Module, str]) -> _LinearStack:
        found = linear_layers(layers)
        return cls(found, tuple(map(names.get, found)))

    @property
    def adapt(self) -> bool:
        return any(self.names)

    def rates(self, rates: InnerRates) -> list[LayerRate]:
        # 0 where a layer does not adapt: after_step never reads it.
        return [0.0 if name is None else rates.of_layer(name) for name in self.names]

    def one_rate(self, rates: Sequence[LayerRate]) -> float | None:
        """Return the one rate of all layers that adapt; None if they differ, or are learned."""
        adapting = [rate for rate, name in zip(rates, self.names, strict=True) if name is not None]
        if not all(isinstance(rate, float) for rate in adapting) or len(set(adapting)) != 1:
            return None
        return cast(float, adapting[0])

    def mlp(
        self,
        rows_PD: Tensor,
        gates_TO: Sequence[Tensor | None],
        tasks: PaddedTasks,
        plan: AdaptationPlan,
    ) -> AdaptedMlp:
        dtype = _precision(rows_PD)
        sides = tasks.support.rectangles, tasks.query.rectangles
        sizes = [TaskSize(mine.rows, other.rows) for mine, other in zip(*sides, strict=True)]
        gates_TO = gates_TO or [None] * len(self.layers)
        return AdaptedMlp(
            tuple(layer.weight.to(dtype) for layer in self.layers),
            tuple(layer.bias.to(dtype) for layer in self.layers),
            tuple(None if gate_TO is None else gate_TO.to(dtype) for gate_TO in gates_TO),
            # A path for each rectangle: the size of its tasks decides.
            tuple(
                ()
                if name is None
                else tuple(
                    plan.path(name, layer.in_features, layer.out_features, size) for size in sizes
                )
                for layer, name in zip(self.layers, self.names, strict=True)
            ),
            tasks.support,
            tuple(1.0 if name is None else plan.bias_rate(name) for name in self.names),
        )


def _row_loss(
    rows: PaddedRows, losses: LabelLosses, dtype: torch.dtype, prior: float = 0.0
) -> RowLoss:
    """Return the sum over the tasks of the mean loss of their rows (smoothed by `prior`)."""
    # In float32 under autocast: the loss and its weights lose too much in 8 bits.
    weight_N = rows.mean_weights_N(torch.float32 if dtype in HALVES else dtype, prior)
    weight_NL, shape_NL = weight_N.unsqueeze(1), (rows.num_rows, len(losses.losses))
    label_NL = losses.standardise(known_labels(rows.label_N, rows.weight).view(shape_NL))
    if rows.weight is not None:
        weight_NL = weight_NL * rows.weight.view(shape_NL)
    return RowLoss(losses, label_NL, losses.scale(weight_NL), rows)


def _in_autocast(rows_NI: Tensor) -> Tensor:
    # By hand: operations with written-out derivatives are closed to autocast.
    return rows_NI.to(_precision(rows_NI))


def _precision(rows: Tensor) -> torch.dtype:
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
