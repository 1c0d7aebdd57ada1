"""The inner loop for any model: from support rows to adapted parameters, and the model's outputs
with them. fused/fused_loop.py does the same for models that end in an MLP, in less time.

    theta_t <- theta_t - a grad L_support(theta_t), k times,

for the chosen linear layers and, if the config says so, for the task's copies of embedding rows.

Shape suffixes: T tasks, N rows, S support rows, D embedding width, P task-row pairs, O outputs, X
all inputs side by side, J parts of a gate"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gmeta.adaptation.adaptation_plan import AdaptationPlan, TaskSize
from gmeta.adaptation.adapted_layers import AdaptedLayers, Gates
from gmeta.adaptation.closed_form import grad_and_hessian_N, solve_TS
from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.adaptation.layout.sides import Side, Sides, WorkingRows
from gmeta.adaptation.learned_parts import NOTHING_LEARNED, LearnedParts
from gmeta.adaptation.plain_update import PlainUpdate
from gmeta.adaptation.rates import InnerRates, scale_grads
from gmeta.losses.objectives import LabelLosses, Objectives, known_labels, weigh_rows_N
from gmeta.losses.row_losses import weighted_sum
from gmeta_models.gated import GatedModel, row_layers
from gmeta_models.inputs import RowInputs
from gmeta_models.mlp import drop_units
from gmeta_models.model_config import resolve_pooling
from gmeta_models.model_outputs import split_output
from gmeta_models.support_encoder import SupportRows


@dataclass(frozen=True)
class AdaptedModel:
    """A model after k inner steps, for every task."""

    layers: AdaptedLayers
    rows_PD: Tensor
    rate: float | Tensor = 0.0  # of these rows
    support: Side | None = None  # that further steps go by; None: there are none
    # Before each step, the sum of the tasks' (smoothed) mean support losses, if they have rows.
    support_loss_sums: tuple[Tensor, ...] = ()


class GeneralLoop:
    """Takes k SGD steps on every support set by `plan` and `rates`; owns no parameters."""

    def __init__(
        self,
        model: nn.Module,
        plan: AdaptationPlan,
        objectives: Objectives,
        rates: InnerRates,
        learned: LearnedParts = NOTHING_LEARNED,
    ) -> None:
        self.config = plan.config
        self._model = model
        self._learned = learned
        self.plan = plan
        self._objectives = objectives
        self.rates = rates

    def adapt(self, rows: WorkingRows, tasks: Sides, second_order: bool) -> AdaptedModel:
        """Return theta_t of every task, after k inner steps; see FusedLoop.start."""
        return self.take_steps(rows, tasks.support, tasks.query.layout.longest, second_order)

    def start(self, rows: WorkingRows, tasks: Sides, second_order: bool) -> AdaptedModel:
        """Return the parameters before the first step."""
        return self._started(rows, tasks.support, tasks.query.layout.longest)

    def query_loss_sum(self, adapted: AdaptedModel, tasks: Sides) -> Tensor:
        """Return the sum over the tasks of the mean query loss; a task without rows counts 0."""
        losses_N = self.losses_N(adapted, tasks.query)
        return weighted_sum(losses_N, tasks.query.layout.mean_weights_N(losses_N.dtype))

    def take_steps(
        self,
        rows: WorkingRows,
        support: Side,
        query_rows: int,
        second_order: bool,
        keep_path: bool = False,
    ) -> AdaptedModel:
        """Return the parameters after k inner steps on the support rows; `keep_path` keeps the
        support losses differentiable in first order too, at the price of their graphs."""
        # `query_rows`, of the longest task, only helps to choose the cheaper path of a layer.
        adapted = self._started(rows, support, query_rows)
        # Where no step changes anything, none is taken, however many there are.
        is_idle = not (self.plan.adapts and support.layout.num_rows)
        for _ in range(0 if is_idle else self.config.inner_steps):
            adapted = self.step(adapted, second_order, keep_path)
        return adapted

    def _started(self, rows: WorkingRows, support: Side, query_rows: int) -> AdaptedModel:
        size = TaskSize(support.layout.longest, query_rows)
        layers = AdaptedLayers(self.plan, self.rates, size, self._gates(rows, support))
        return AdaptedModel(layers, rows.values_PD, rows.rate, support)

    def unadapted(self, rows: WorkingRows, side: Side) -> AdaptedModel:
        """Return the meta-parameters as they are, for tasks of which nothing is known yet."""
        # No layer adapts, so none needs a hook.
        nothing = replace(self.plan, layers={})
        gates = self._gates(rows, side, known=False)
        return AdaptedModel(
            AdaptedLayers(nothing, self.rates, TaskSize(0, 0), gates), rows.values_PD
        )

    def restore_adapted(
        self, changes: Mapping[str, PlainUpdate], gates_TJO: Mapping[str, Tensor], rows_PD: Tensor
    ) -> AdaptedModel:
        """Return tasks that adapted earlier, from the changes and gates of their layers."""
        layers = row_layers(self._model)
        gates = {name: (layers[name], gate_TJO) for name, gate_TJO in gates_TJO.items()}
        # No further step is taken, so the size chooses no path.
        unmoved = AdaptedLayers(self.plan, self.rates, TaskSize(0, 0), gates)
        return AdaptedModel(unmoved.with_changes(changes), rows_PD)

    def output_N(self, adapted: AdaptedModel, side: Side) -> Tensor:
        """Return the outputs on a side's rows, as logits for bce; [N, labels] of several labels."""
        return self._outputs(adapted, side)[0]

    def _outputs(self, adapted: AdaptedModel, side: Side) -> tuple[Tensor, Tensor | None]:
        with adapted.layers.apply(side.layout):
            output, auxiliary_N = split_output(self._model(self._inputs(side, adapted.rows_PD)))
        return self._objectives.outer.logits(output), auxiliary_N

    def losses_N(self, adapted: AdaptedModel, side: Side) -> Tensor:
        """Return the loss of each row of a side, at the adapted parameters, with dropout and what
        the model adds of its own."""
        with drop_units(self._model):
            output_N, auxiliary_N = self._outputs(adapted, side)
        losses_N = _losses_N(self._objectives.outer, output_N, side)
        if auxiliary_N is None:
            return losses_N
        return losses_N + weigh_rows_N(auxiliary_N.to(losses_N.dtype), side.weight)

    def _inputs(self, side: Side, rows_PD: Tensor) -> RowInputs:
        inputs, generator = side.inputs(rows_PD), self._learned.generator
        return inputs if generator is None else generator(inputs)

    def _gates(self, rows: WorkingRows, side: Side, known: bool = True) -> Gates:
        """Return the gates of each layer for a side's tasks; without `known` as of no rows."""
        model, encoder = self._model, self._learned.encoder
        if not isinstance(model, GatedModel) and encoder is None:
            return {}
        inputs, layout, label_N = self._inputs(side, rows.values_PD), side.layout, side.label_N
        if not known:
            inputs, label_N = inputs.no_rows(), label_N[:0]
            layout = RowLayout(torch.zeros_like(layout.lengths_T), 0, 0, None)
        layers, gates_TJO = row_layers(model), dict[str, Tensor]()
        if isinstance(model, GatedModel):
            by_layer = model.gates_TO(layout.mean_TX(model.seen_NX(inputs)))
            gates_TJO = {name: gate_TO.unsqueeze(1) for name, gate_TO in by_layer.items()}
        if encoder is None:
            return {name: (layers[name], gate_TJO) for name, gate_TJO in gates_TJO.items()}
        error_N = label_N
        if known:
            # The encoder also reads the error of the unadapted model: what adapting has to mend.
            cold_N = self.output_N(self.unadapted(rows, side), side)
            error_N = self._objectives.outer.errors(cold_N, label_N, side.weight, layout)
            label_N = self._objectives.outer.standardise(known_labels(label_N, side.weight))
        features_NX = inputs.pooled(resolve_pooling(model)).side_by_side_NX()
        dtype = features_NX.dtype
        support = SupportRows(features_NX, label_N.to(dtype), error_N.to(dtype), layout.lengths_T)
        for name, by_TJO in encoder(support).items():
            scale_T1O, shift = by_TJO.tensor_split([1], dim=1)
            own_T1O = gates_TJO.get(name)
            scale_T1O = scale_T1O if own_T1O is None else own_T1O * scale_T1O
            gates_TJO[name] = torch.cat([scale_T1O, shift], dim=1)
        return {name: (layers[name], gate_TJO) for name, gate_TJO in gates_TJO.items()}

    def step(
        self, adapted: AdaptedModel, second_order: bool, keep_path: bool = False
    ) -> AdaptedModel:
        """Return the parameters after one more inner step, w - a g; layers as PlainUpdate. The
        model that is passed in changes too: do not use it again."""
        support, rate = adapted.support, adapted.rate
        if support is None or not (self.plan.adapts and support.layout.num_rows):
            return adapted
        if self.plan.solves:
            return self._solve_step(adapted, support, second_order)
        adapts_rows = self.plan.adapts_rows
        before_PD = adapted.rows_PD
        # A view: the step's gradient must not see what the same rows do elsewhere, in the gates.
        rows_PD = before_PD.view_as(before_PD) if second_order or keep_path else before_PD.detach()
        if adapts_rows and not rows_PD.requires_grad:
            # Predictions fetch rows without a gradient, but their inner steps need one.
            rows_PD.requires_grad_()
        # Where the path is what learns (Reptile), its steps have dropout.
        drops = drop_units(self._model) if keep_path else nullcontext()
        with adapted.layers.apply(support.layout) as tape, drops:
            output_N, auxiliary_N = split_output(self._model(self._inputs(support, rows_PD)))
        inner = self._objectives.inner
        losses_N = _losses_N(inner, inner.logits(output_N), support)
        prior = self.config.support_prior
        loss_sum = weighted_sum(losses_N, support.layout.mean_weights_N(losses_N.dtype, prior))
        # A model may read no row but through what its encoder made of events, and have layers that
        # make its auxiliary loss alone.
        may_be_unused = adapts_rows or auxiliary_N is not None
        wanted = [*tape.outputs, rows_PD] if adapts_rows else tape.outputs
        # All tasks at once: they share no adapted value, so the sum's gradient is each task's own.
        grads = torch.autograd.grad(
            loss_sum,
            wanted,
            create_graph=second_order,
            retain_graph=second_order or keep_path,
            allow_unused=may_be_unused,
            materialize_grads=may_be_unused,
        )
        adapted.layers.step(tape, grads[: len(tape.outputs)], second_order)
        return replace(
            adapted,
            rows_PD=before_PD - scale_grads(grads[-1], rate) if adapts_rows else before_PD,
            support_loss_sums=(*adapted.support_loss_sums, loss_sum),
        )

    def _solve_step(self, adapted: AdaptedModel, support: Side, second_order: bool) -> AdaptedModel:
        """Return the parameters after one step in closed form (closed_form.py)."""
        layout, rate = support.layout, self.config.inner_lr
        with adapted.layers.apply(layout) as tape:
            made = self._model(self._inputs(support, adapted.rows_PD))
            output_N, auxiliary_N = split_output(made)
        # One loss: check_solvable refused several when the learner was made.
        (loss,) = self._objectives.inner.losses
        known_N = known_labels(support.label_N, support.weight)
        label_N = self._objectives.inner.standardise(known_N)
        grad_N, hessian_N = grad_and_hessian_N(loss, output_N, label_N)
        if support.weight is not None:
            grad_N, hessian_N = grad_N * support.weight, hessian_N * support.weight
        # A row's output is its own: the gradient of their sum holds each one's Jacobian.
        jacobians = torch.autograd.grad(
            output_N.sum(), tape.outputs, create_graph=second_order, retain_graph=second_order,
            materialize_grads=auxiliary_N is not None,
        )  # fmt: skip
        with torch.set_grad_enabled(second_order):
            layers = adapted.layers.gradients_of(tape, jacobians)
            rows_TS = layout.pad(grad_N), layout.pad(hessian_N)
            solution_N = layout.unpad(solve_TS(layers, *rows_TS, rate))
            if prior := self.config.support_prior:
                lengths_T = layout.lengths_T.to(solution_N.dtype)
                # The prior counts as that many rows without a gradient, as in a gradient step.
                solution_N = solution_N * layout.spread(lengths_T / (lengths_T + prior))
            grads = [each * _broadcast_rows(solution_N, each) for each in jacobians]
            adapted.layers.step(tape, grads, second_order)
        return adapted


def _broadcast_rows(values_N: Tensor, rows: Tensor) -> Tensor:
    return values_N.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))


def _losses_N(losses: LabelLosses, logits: Tensor, side: Side) -> Tensor:
    return losses.row_losses_N(logits, side.label_N, side.weight, side.layout)
