"""The meta-learning step: fetched rows and episodes in, a loss whose gradient is the meta-gradient
out.

support -> adapt -> query loss, for all tasks of a rank's batch at once (meta-gradient: arXiv
2401.04338, algorithm 1; the outer loss is the mean over all tasks of all ranks).

Shape suffixes: N rows, U fetched rows, P distinct (task, row) pairs, D embedding width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from gmeta.adaptation.algorithm import TableSizes
from gmeta.adaptation.algorithms import find_algorithm
from gmeta.adaptation.blocks import StackedBlocks, TaskBlocks
from gmeta.adaptation.config import PLAIN, AlgorithmConfig
from gmeta.adaptation.fused import FusedLoop
from gmeta.adaptation.inner_loop import InnerLoop, WorkingRows
from gmeta.adaptation.layout import RowLayout
from gmeta.adaptation.linear import adaptable_layers
from gmeta.adaptation.side import Side, Sides, TaskGroups
from gmeta.batches.blocks import block_groups, task_blocks
from gmeta.batches.episodes import (
    Episodes,
    plain_rows,
    side_lengths,
    support_and_query,
    task_groups,
)
from metaio.batch import TaskBatch
from models.decision import DecisionModel
from models.gated import GatedModel


@dataclass(frozen=True)
class QueryPrediction:
    """Outputs on the query rows of a batch, task by task, before and after adaptation (logits for
    BCE).
    """

    before_N: Tensor
    after_N: Tensor
    label_N: Tensor
    layout: RowLayout
    support_lengths_T: Tensor


class MetaLearner(nn.Module):
    """A model and the way it adapts; knows nothing of ranks, tables or optimizers.

    `tables` tells how many rates to learn for embedding rows; other algorithms do without.

    Raises:
        ValueError: the algorithm is unknown, or does not fit the model or the rest of its config.
    """

    def __init__(
        self,
        model: nn.Module,
        config: AlgorithmConfig,
        loss: str,
        tables: TableSizes = TableSizes(0, 0),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        self.model = model
        self._algorithm = find_algorithm(config.name)
        self._config = self._algorithm.preset(model, config)
        layers = adaptable_layers(model, self._config.adapt_layers)
        self._num_adapted = sum(layer.weight.numel() for layer in layers.values())
        self.rates = self._algorithm.rates(layers, self._config, tables)
        self._inner_loop = InnerLoop(model, self._config, loss, self.rates)
        self._fused = None
        second_order = self._algorithm.query_loss_of == "second order"
        if isinstance(model, DecisionModel) and FusedLoop.suits(
            model, self._config, self.rates, second_order
        ):
            self._fused = FusedLoop(model, self._config, loss, self.rates)

    @property
    def support_rows_learn(self) -> bool:
        """Whether the outer gradient reaches embedding rows through the support rows that use them.

        Not in first order: the inner gradients are constants then. But the rows may set gates.
        """
        return (
            self._config.name == PLAIN
            or self._algorithm.query_loss_of != "first order"
            or isinstance(self.model, GatedModel)
        )

    def use_general_loop(self) -> None:
        """Never take the fused inner loop: its written-out derivatives know one type of number."""
        self._fused = None

    def arrange(self, batch: TaskBatch) -> Episodes:
        """What `forward` takes, from a batch on the host."""
        if self._config.name == PLAIN:
            return plain_rows(batch)
        rows_per_task = self._config.adapt_embeddings
        if self._fused is not None and self._algorithm.query_loss_of is not None:
            groups = block_groups(batch)
            if any(group.support_rows for group in groups):
                second_order = self._algorithm.query_loss_of == "second order"
                stacked = second_order and not self._fused.moves_inputs
                pooling, history = self._fused.pooling, self._fused.history
                constant_support = not rows_per_task and not self.support_rows_learn
                return task_blocks(
                    batch,
                    groups,
                    rows_per_task,
                    stacked,
                    pooling,
                    history,
                    constant_support,
                    self._fused.splits_weights,
                )
        episodes = task_groups(batch, rows_per_task, self._num_adapted)
        if self._algorithm.learns_from == "support":
            support_T, query_T = side_lengths(batch)
            num_terms, num_shown = np.count_nonzero([support_T, support_T * query_T], axis=1)
            episodes = replace(episodes, num_terms=int(num_terms), num_shown=int(num_shown))
        return episodes

    def arrange_to_predict(self, batch: TaskBatch) -> Episodes:
        """What `predict` takes, from a batch on the host."""
        return support_and_query(
            batch, rows_per_task=self._config.adapt_embeddings, to_predict=True
        )

    def forward(self, rows_UD: Tensor, episodes: Episodes, weight: float) -> Tensor:
        """`weight` times the sum of the loss terms, a scalar: backward gives the meta-gradient.

        With weight = world_size / terms of all ranks, data-parallel averaging turns the sum of
        local terms into the mean over all ranks' terms, however unevenly the ranks are filled.
        """
        if episodes.num_terms == 0:
            return self._zero(rows_UD)
        rows = self._working_rows(rows_UD, episodes)
        inner = self._inner_loop
        match episodes.rows:
            case Side() as query:
                loss_sum = inner.losses_N(inner.unadapted(rows, query), query).sum()
            case Sides() as sides:
                loss_sum = self._general_loss_sum(rows, [sides])
            case TaskGroups(groups):
                loss_sum = self._general_loss_sum(rows, groups)
            case TaskBlocks() | StackedBlocks() as blocks:
                if self._fused is None:
                    raise ValueError(
                        "blocks, but this learner has no fused loop: use its own arrange"
                    )
                second_order = self._algorithm.query_loss_of == "second order"
                loss_sum = self._fused.loss_sum(rows, blocks, second_order)
        return loss_sum * weight

    def _general_loss_sum(self, rows: WorkingRows, groups: Sequence[Sides]) -> Tensor:
        """The algorithm's loss terms of all groups, added up: a scalar."""
        terms = [self._algorithm.loss_sum(self._inner_loop, rows, *sides) for sides in groups]
        loss_sum = torch.stack(terms).sum()
        if all(sides.support.layout.num_rows == 0 for sides in groups):
            # No inner step: what only those use must still join every collective.
            loss_sum = loss_sum + self._zero(rows.values_PD)
        return loss_sum

    def predict(self, rows_UD: Tensor, episodes: Episodes) -> QueryPrediction:
        """Outputs on the query rows with the meta-parameters, and after adapting on the support
        rows.
        """
        if not isinstance(episodes.rows, Sides):
            raise ValueError(
                "episodes arranged for training have no sides of all tasks: use arrange_to_predict"
            )
        inner, (support, query) = self._inner_loop, episodes.rows
        rows = self._working_rows(rows_UD.detach(), episodes)
        # Adapting takes gradients, also where the caller has turned them off.
        with torch.enable_grad():
            adapted = inner.adapt(rows, support, query.layout.longest, second_order=False)
        with torch.no_grad():
            before_N = inner.output_N(inner.unadapted(rows, query), query)
            after_N = inner.output_N(adapted, query)
        lengths_T = support.layout.lengths_T
        return QueryPrediction(before_N, after_N, query.label_N, query.layout, lengths_T)

    def _working_rows(self, rows_UD: Tensor, episodes: Episodes) -> WorkingRows:
        """The rows that the sides index, with their rates where they adapt."""
        id_of_copy_P = episodes.id_of_copy_P
        if id_of_copy_P is None:
            return WorkingRows(rows_UD, 0.0)
        rate = self.rates.of_rows(episodes.unique_lengths_B, id_of_copy_P)
        return WorkingRows(episodes.working_rows_PD(rows_UD), rate)

    def _zero(self, rows_UD: Tensor) -> Tensor:
        """A loss of 0 that reaches every parameter: a rank without work still joins every
        collective.
        """
        return sum((parameter.sum() * 0.0 for parameter in self.parameters()), rows_UD.sum() * 0.0)
