"""The meta-learning step: fetched rows and episodes in, a loss whose gradient is the meta-gradient
out.

support -> adapt -> query loss, for all tasks of a rank's batch at once (meta-gradient: arXiv
2401.04338, algorithm 1; the outer loss is the mean over all tasks of all ranks).

Shape suffixes: T tasks, N rows, K dense columns, B tables, U unique ids, D embedding width, P
task-row pairs, X all inputs side by side, A items, Q query rows, M multi-id features"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from gmeta.adaptation.adaptation_plan import AdaptationPlan
from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.adaptation.algorithms.maml import QueryLoss
from gmeta.adaptation.algorithms.registry import find_algorithm
from gmeta.adaptation.closed_form import check_solvable
from gmeta.adaptation.fused.fused_loop import FusedLoop, MovingLoop, StillLoop
from gmeta.adaptation.general_loop import AdaptedModel, GeneralLoop
from gmeta.adaptation.layout.event_inputs import with_event_inputs
from gmeta.adaptation.layout.padded_layout import PaddedTasks, kind_of_device
from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.adaptation.layout.sides import Side, Sides, TaskGroups, WorkingRows
from gmeta.adaptation.learned_parts import NOTHING_LEARNED
from gmeta.config.algorithm import ALGORITHM_OPTIONS, AlgorithmConfig
from gmeta.data.collate import CollateOptions
from gmeta.data.cuda_graphs import Capture, LossGraphs
from gmeta.data.episodes import CollatedRows, Episodes, collate_support_query
from gmeta.data.event_layout import EventColumns
from gmeta.data.features.item_statistics import ItemStatistics
from gmeta.data.features.neighbours import Neighbours
from gmeta.data.features.regression import Regression, fit_regression, select_query_rows
from gmeta.data.features.support_statistics import NO_STATISTICS, SupportStatistics
from gmeta.data.task_groups import GROUP_WORK, least_gain
from gmeta.errors import ConfigError, GMetaError
from gmeta.losses.objectives import Objectives
from gmeta.losses.step_softmax import drawn_softmax_Q, sampled_softmax_Q
from gmeta_keys.plugins import is_ours
from gmeta_keys.translate_errors import format_foreign_error, translate_errors
from gmeta_models.decision_model import DecisionModel
from gmeta_models.dot import Dot, find_user_vectors
from gmeta_models.eval_mode import in_eval_mode
from gmeta_models.initial_sum import list_sum_layers, start_as_sum
from gmeta_models.mlp import DropoutReLU
from gmeta_models.sequence.encoder import EventEncoder, EventVectors
from gmeta_models.table_projections import TableProjections
from metaio.read.batch import TaskBatch


@dataclass(frozen=True)
class QueryPrediction:
    """Outputs on query rows, task by task, before and after adaptation; logits for bce."""

    before_N: Tensor  # of several labels [N, labels], as the next two
    after_N: Tensor
    label_N: Tensor  # NaN: not known
    layout: RowLayout
    support_lengths_T: Tensor
    # Of a model that scores by a product with an item's vector: before and after adapting.
    users_ND: tuple[Tensor, Tensor] | None = None


class MetaLearner(nn.Module):
    """A model and the way it adapts; knows nothing of ranks, tables or optimizers.

    `loss` is that of its one label, or the objectives of several, each of which has an output of
    the model. `tables` are needed where rates of embedding rows are learned. Raises ValueError: the
    algorithm is unknown, or does not fit the model or the rest of its config."""

    def __init__(
        self,
        model: nn.Module,
        config: AlgorithmConfig,
        loss: str | Objectives,
        tables: TableSizes = TableSizes(0, 0),  # noqa: B008 - frozen
        statistics: SupportStatistics = NO_STATISTICS,
        items: ItemStatistics | None = None,
        neighbours: Neighbours | None = None,
        projections: TableProjections | None = None,
        events: EventEncoder | None = None,
        event_columns: EventColumns | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        # Its vector of each row stands before the dense columns; no inner step moves it.
        self.events, self.event_columns = events, event_columns
        self.tables = tables
        # Rows of narrow tables come to the model through projections, and adapt as their outputs.
        self.projections = projections or TableProjections({}, tables.width)
        # Behind the dense columns stand the statistics of items, then those of support rows.
        self.statistics = statistics
        self.items = items
        self.neighbours = neighbours
        objectives = Objectives.of(loss) if isinstance(loss, str) else loss
        self.objectives = objectives
        self._algorithm = find_algorithm(config.name)
        if config.name not in ALGORITHM_OPTIONS:
            config = config.with_options_of(self._algorithm.options)
        self._config = self._algorithm.preset(model, config)
        algorithm = self._algorithm
        if algorithm.solves:
            check_solvable(config.name, objectives)
        # The preset comes first: it may choose what adapts.
        self._plan = AdaptationPlan.of(model, self._config, algorithm.takes_steps, algorithm.solves)
        self.rates = self._algorithm.rates(self._plan, tables)
        self._parts = self._algorithm.parts(model, self._config, tables)
        # As attributes of this module: the optimizer, checkpoints and exports find them so.
        self.encoder, self.generator = self._parts.encoder, self._parts.generator
        if not self._config.train_base:
            if self._parts == NOTHING_LEARNED:
                raise ValueError(
                    "algorithm.options.train_base = false with algorithm.name = "
                    f'"{config.name}": nothing '
                    "would learn. Set it to true, or choose encoder or metaemb, which learn a part "
                    "of their own"
                )
            model.requires_grad_(False)
            self.projections.requires_grad_(False)
            if events is not None:
                events.requires_grad_(False)
        self.general_loop = GeneralLoop(model, self._plan, objectives, self.rates, self._parts)
        self.in_buckets = False  # whether batches have few shapes: data/buckets.py
        self._graphs: LossGraphs | None = None
        outer_loss = self._algorithm.loss_sum
        # A part of another package may have parameters that it does not use.
        self._is_all_ours = all(map(is_ours, (*self.modules(), outer_loss)))
        asks_inner_loop_alone = isinstance(outer_loss, QueryLoss) and self._parts == NOTHING_LEARNED
        # Of its training batches, those of plain epochs and without a support row aside.
        self.route = self._plan.route(model, self.rates, asks_inner_loop_alone)
        self._fused: tuple[QueryLoss, FusedLoop[Any]] | None = None
        if self.route == "fused":
            assert isinstance(outer_loss, QueryLoss)  # the route is of such alone
            assert isinstance(model, DecisionModel)
            kind = MovingLoop if self._plan.moves_inputs(model) else StillLoop
            self._fused = outer_loss, kind(model, self._plan, objectives, self.rates)

    @property
    def generated_table(self) -> int:
        """Return the place of the table whose embeddings the generator makes; -1: none."""
        return self._parts.generated_table

    @property
    def inner_steps(self) -> int:
        """Return the number of inner steps on a task's support rows."""
        # A loss over the step's items has no inner form: what a task has is in its events.
        return 0 if self._competes_in_steps else self._config.inner_steps

    @property
    def shares_events(self) -> bool:
        """Return whether ranks encode long tasks' events together: all must take part."""
        return self.events is not None and self.events.over_ranks is not None

    @property
    def _competes_in_steps(self) -> bool:
        columns = self.event_columns
        return columns is not None and not (columns.log_share_A is None and columns.draws is None)

    def fit_regression(self, batches: Iterable[TaskBatch]) -> Regression:
        """Return the regression of labels on the inputs that training gives query rows."""
        features = self.collate_options().with_features
        parts = [select_query_rows(features(batch)) for batch in batches]
        input_NK, label_N, weight_N = (
            torch.cat(part).double() for part in zip(*parts, strict=True)
        )
        losses = self.objectives.outer
        return fit_regression(losses.losses[0], input_NK, losses.standardise(label_N), weight_N)

    def start_as(self, regression: Regression) -> str:
        """Have a fresh model's output be that of a regression, whatever the embeddings; return the
        line that says so."""
        start_as_sum(list_sum_layers(self.model), regression.weight_K, regression.bias)
        if self.encoder is not None:
            # Its draw is small, but not 0: the sum would be scaled a little.
            nn.init.zeros_(self.encoder.modulations.weight)
        num_rows, num_inputs = regression.num_rows, len(regression.weight_K)
        return f"model.linear_start: from {num_rows:,} query rows and {num_inputs:,} inputs"

    def use_general_loop(self) -> None:
        """Take the general inner loop, which computes the same as the fused one, step by step."""
        if self.route == "fused":
            self.route, self._fused = "general", None

    def use_graphs(self, capture: Capture) -> str:
        """Run steps as CUDA graphs from now on; return why not, "" if it does."""
        # A replay repeats kernels alone: Python code of another package would run at capture only.
        losses = (loss.own.function for loss in self.objectives.outer.losses if loss.own)
        parts = *self.model.modules(), self.rates, *losses
        own = [part for part in parts if not is_ours(part)]
        if self.route != "fused":
            return f"{self._config.name} adapts this model in the general loop"
        if self.shares_events:
            return "tasks of many events are encoded together with other ranks"
        if own:
            name = getattr(own[0], "__qualname__", type(own[0]).__name__)
            return f"{name} is no part of gmeta, and may read values or draw them"
        if any(isinstance(part, DropoutReLU) for part in self.model.modules()):
            return "model.dropout draws anew in each step"
        encoder = () if self.events is None else self.events.modules()
        if any(isinstance(part, nn.Dropout) and part.p for part in encoder):
            return "model.event_options.dropout draws anew in each step"
        if not self.in_buckets:
            return "batches are not arranged in few shapes (run.shape_buckets)"
        self._graphs = LossGraphs(self, self._loss_sum, capture)
        return ""

    def collate(self, batch: TaskBatch, epoch: int = sys.maxsize) -> Episodes:
        """Return the input of `forward` in this epoch of a run, from a batch on the host."""
        # Without an epoch none of the plain epochs is meant: those come first.
        return self.collate_options().collate(batch, epoch)

    def collate_options(self) -> CollateOptions:
        """Return how batches are collated, without the weights: see CollateOptions."""
        layout, device = None, kind_of_device(self.model)
        if self._fused is not None:
            query_loss, loop = self._fused
            layout = loop.layout(query_loss.second_order, self.in_buckets)
        return CollateOptions(
            device=device,
            items=None if self.items is None else self.items.fold_statistics(),
            neighbours=None if self.neighbours is None else self.neighbours.fold_lists(),
            statistics=self.statistics,
            route=self.route,
            plain_epochs=self._config.plain_epochs,
            layout=layout,
            rows_per_task=self._plan.adapts_rows,
            least_gain=least_gain(GROUP_WORK, device, self._plan.num_weights),
            learns_from_support=self._algorithm.learns_from == "support",
            events=self.event_columns,
        )

    def with_items(self, batch: TaskBatch) -> TaskBatch:
        """Return a batch to predict with the statistics of its rows' items."""
        return batch if self.items is None else self.items.with_features(batch)

    def with_support(self, batch: TaskBatch) -> TaskBatch:
        """Return a batch that has `with_items` with the statistics of its support rows."""
        lists = None if self.neighbours is None else self.neighbours.lists()
        return self.statistics.with_features(batch, lists)

    def collate_to_predict(self, batch: TaskBatch) -> Episodes:
        """Return the input of `predict`, from a batch on the host."""
        episodes = collate_support_query(
            self.with_support(self.with_items(batch)),
            rows_per_task=self._plan.adapts_rows,
            to_predict=True,
        )
        columns = self.event_columns
        return episodes if columns is None else episodes.with_events(columns.lay_out(batch))

    def forward(self, rows_UD: Tensor, episodes: Episodes, weight: float) -> Tensor:
        """Return `weight` times the sum of the loss terms, whose gradient is the meta-gradient."""
        # With weight = world_size / terms of all ranks, data-parallel averaging turns the sums of
        # local terms into the mean over all ranks' terms, however unevenly the ranks are filled.
        if episodes.num_terms == 0 and not self.shares_events:
            return self._zero(rows_UD)
        # A generator alone learns (Meta-Embedding on a plain run): the tables stay as they are.
        trained_UD = rows_UD if self._config.train_base else rows_UD.detach()
        take = self._loss_sum if self._graphs is None else self._graphs.loss_sum
        started_UD = self.starting_rows_UD(trained_UD, episodes.rows_of_tables)
        loss_sum = take(started_UD, episodes)
        if not self._is_all_ours:
            loss_sum = loss_sum + self._zero(rows_UD)
        elif not self._config.train_base:
            # A rank whose rows learn nothing still sends their gradients of 0.
            loss_sum = loss_sum + rows_UD.sum() * 0.0
        return loss_sum * weight

    def _loss_sum(self, started_UD: Tensor, episodes: Episodes) -> Tensor:
        sides, vectors = self._with_events(started_UD, episodes)
        if not self.shares_events:
            return self._loss_of(started_UD, episodes, sides, vectors)
        assert vectors is not None
        loss_sum = self._zero(started_UD)
        if episodes.num_terms:
            loss_sum = self._loss_of(started_UD, episodes, sides, vectors)
        # Other ranks wait for this one's part of the gradient, whatever its own loss reads.
        return loss_sum + vectors.interest_ND.sum() * 0.0

    def _loss_of(
        self, started_UD: Tensor, episodes: Episodes, sides: CollatedRows,
        vectors: EventVectors | None,
    ) -> Tensor:  # fmt: skip
        own_UD = self.projections.hide_UD(started_UD, episodes.inputs.unique_lengths_B)
        rows, general = self._working_rows(own_UD, episodes), self.general_loop
        match sides:
            case Side() as query if vectors is not None and self._competes_in_steps:
                return self._step_softmax_sum(started_UD, vectors, episodes, query)
            case Side() as query:
                loss_sum = general.losses_N(general.unadapted(rows, query), query).sum()
                # What only an algorithm uses must still join every collective.
                return loss_sum if self.route == "plain" else loss_sum + self._zero(rows.values_PD)
            case Sides() as sides:
                return self._general_loss_sum(rows, [sides])
            case TaskGroups(groups):
                return self._general_loss_sum(rows, groups)
            case PaddedTasks() as tasks:
                if self._fused is None:
                    raise ValueError(
                        "padded tasks, but this learner has no fused loop: use its own arrange"
                    )
                query_loss, loop = self._fused
                return query_loss(loop, rows, tasks)

    def _step_softmax_sum(
        self, started_UD: Tensor, vectors: EventVectors, episodes: Episodes, side: Side
    ) -> Tensor:
        """Return the sum of the positive rows' losses among the items of all rows, or those that
        were drawn for the step."""
        events = episodes.inputs.events
        assert isinstance(self.model, Dot)
        assert events is not None
        own_Q = (side.label_N > 0).nonzero().squeeze(1)
        user_QD = self.model.user_vectors_ND(vectors.interest_ND[own_Q])
        items = vectors.target_ND, own_Q, events.item_N
        if events.drawn is None:
            losses_Q = sampled_softmax_Q(user_QD, *items, events.log_share_N)
        else:
            drawn_AD = embedding(events.drawn.target_AM, started_UD).sum(dim=1)
            losses_Q = drawn_softmax_Q(user_QD, *items, drawn_AD, events.drawn)
        if side.weight is not None:
            losses_Q = losses_Q * side.weight[own_Q].to(losses_Q.dtype)
        # The head's bias changes no softmax, but joins the collectives.
        return losses_Q.sum() + self._zero(vectors.target_ND)

    def _general_loss_sum(self, rows: WorkingRows, groups: Sequence[Sides]) -> Tensor:
        loss_sum = self._algorithm.loss_sum
        problem = translate_errors(self._loss_error, GMetaError)
        with nullcontext() if is_ours(loss_sum) else problem:
            terms = [loss_sum(self.general_loop, rows, sides) for sides in groups]
        for term in terms:
            if not isinstance(term, Tensor) or term.dim():  # all of it would be added up
                made = f"of shape {list(term.shape)}" if isinstance(term, Tensor) else repr(term)
                raise self._refuse_loss(f"{made}; a scalar is needed, the sum over the tasks")
        total = torch.stack(terms).sum()
        if all(sides.support.layout.num_rows == 0 for sides in groups):
            # No inner step: what only those use must still join every collective.
            total = total + self._zero(rows.values_PD)
        if not total.requires_grad:
            raise self._refuse_loss("without a gradient; one is needed, so leave out .detach()")
        return total

    def _loss_error(self, error: Exception) -> ConfigError:
        message = f"algorithm.name = {self._config.name!r} cannot make its loss"
        return ConfigError(
            f"{message}: {format_foreign_error(error)}. Mend its loss_sum; --verbose shows the line"
        )

    def _refuse_loss(self, problem: str) -> ConfigError:
        name = self._config.name
        return ConfigError(
            f"algorithm.name = {name!r} makes a loss {problem}. Correct its loss_sum"
        )

    def predict(self, rows_UD: Tensor, episodes: Episodes) -> QueryPrediction:
        """Return the outputs on the query rows, before and after adapting on the support rows."""
        return self.predict_along(rows_UD, episodes, (self.inner_steps,))[0]

    def predict_along(
        self, rows_UD: Tensor, episodes: Episodes, steps: Sequence[int]
    ) -> list[QueryPrediction]:
        """Return what `predict` does after each of these ascending numbers of inner steps."""
        if not isinstance(episodes.rows, Sides):
            raise ValueError(
                "episodes arranged for training have no sides of all tasks: use collate_to_predict"
            )
        inner = self.general_loop
        started_UD = self.starting_rows_UD(rows_UD.detach(), episodes.rows_of_tables)
        with torch.no_grad(), in_eval_mode(self):
            sides, _ = self._with_events(started_UD, episodes)
            lengths_B = episodes.inputs.unique_lengths_B
            started_UD = self.projections.hide_UD(started_UD, lengths_B)
        assert isinstance(sides, Sides)
        support, query = sides
        rows = self._working_rows(started_UD, episodes)
        with torch.no_grad():
            unknown = self._without_support(query)
            unadapted = inner.unadapted(rows, unknown)
            before_N = inner.output_N(unadapted, unknown)
        # Adapting takes gradients, also where the caller has turned them off.
        with torch.enable_grad():
            adapted = inner.start(rows, sides, second_order=False)
        # All numbers of steps lie on one path: they cost no more than the last of them.
        found, lengths_T = [], support.layout.lengths_T
        for steps_taken, num_steps in pairwise((0, *steps)):
            with torch.enable_grad():
                for _ in range(num_steps - steps_taken):
                    adapted = inner.step(adapted, second_order=False)
            with torch.no_grad():
                after_N = inner.output_N(adapted, query)
            users = None
            if isinstance(self.model, Dot):
                users = (
                    self.user_vectors_ND(unadapted, unknown),
                    self.user_vectors_ND(adapted, query),
                )
            found.append(
                QueryPrediction(before_N, after_N, query.label_N, query.layout, lengths_T, users)
            )
        return found

    def user_vectors_ND(self, adapted: AdaptedModel, query: Side) -> Tensor:
        """Return the vector of each query row's user, as its task has adapted."""
        with torch.enable_grad():
            dense_NK = query.dense_NK.detach().requires_grad_()
            output_N = self.general_loop.output_N(adapted, replace(query, dense_NK=dense_NK))
            return find_user_vectors(dense_NK, output_N, self.tables.width)

    def starting_rows_UD(self, rows_UD: Tensor, rows_of_tables: Sequence[int]) -> Tensor:
        """Return the fetched rows, `rows_of_tables` of each table, as the inner loop takes them."""
        if not self.projections.is_identity:
            rows_UD = self.projections(rows_UD, rows_of_tables)
        if self.generator is None:
            return rows_UD
        table = self._parts.generated_table
        # Where a generator makes a table's embeddings, its rows hold their moves: 0 at the start.
        kept_U1 = rows_UD.new_ones(len(rows_UD), 1)
        kept_U1.narrow(0, sum(rows_of_tables[:table]), rows_of_tables[table]).zero_()
        return rows_UD * kept_U1

    def _with_events(
        self, started_UD: Tensor, episodes: Episodes
    ) -> tuple[CollatedRows, EventVectors | None]:
        """Return the collated rows, with inputs made of events where an encoder makes them."""
        if self.events is None:
            return episodes.rows, None
        layout = episodes.inputs.events
        assert layout is not None  # collating reads the same columns
        vectors: EventVectors = self.events(layout, started_UD)
        return with_event_inputs(episodes.rows, vectors.inputs_NX()), vectors

    def _without_support(self, query: Side) -> Side:
        if not self.statistics.width:
            return query
        dense_NK = query.dense_NK.clone()
        # Statistics of no support rows are all 0; they are the last of the dense columns.
        dense_NK[:, -self.statistics.width :] = 0.0
        return replace(query, dense_NK=dense_NK)

    def _working_rows(self, started_UD: Tensor, episodes: Episodes) -> WorkingRows:
        lengths_B, fetched_row_P, *_ = episodes.inputs
        if fetched_row_P is None:
            return WorkingRows(started_UD, 0.0)
        rate = self.rates.of_rows(lengths_B, fetched_row_P)
        return WorkingRows(episodes.working_rows_PD(started_UD), rate)

    def _zero(self, rows_UD: Tensor) -> Tensor:
        """Return a loss of 0 that reaches every parameter that trains."""
        # A rank without work still joins every collective. Frozen parameters may be masks of -inf,
        # and 0 times their sum would be NaN.
        trained = (parameter for parameter in self.parameters() if parameter.requires_grad)
        return sum((parameter.sum() * 0.0 for parameter in trained), rows_UD.sum() * 0.0)
