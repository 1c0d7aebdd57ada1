"""MAML: the gradient of the query loss through the inner steps, second order and exact.

    theta_t = k steps of  theta <- theta - a grad L_support,t(theta)   from theta,
    min over theta of  mean_t L_query,t(theta_t)

with k = inner_steps and a = inner_lr. Finn et al., "Model-Agnostic Meta-Learning for Fast
Adaptation of Deep Networks", arXiv 1703.03400. No departures; parameters that adapt_layers and
adapt_embeddings leave out are meta-parameters only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gmeta.adaptation.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from gmeta.adaptation.algorithms.algorithm import Adapted, InnerLoop, Tasks
    from gmeta.adaptation.layout.sides import WorkingRows


@dataclass(frozen=True)
class QueryLoss:
    """The outer loss of MAML and its family: the query loss after the inner steps. Without
    `second_order` the inner gradients are constants (fomaml.py)."""

    second_order: bool

    def __call__(
        self, inner_loop: InnerLoop[Tasks, Adapted], rows: WorkingRows, tasks: Tasks
    ) -> Tensor:
        """Return the sum over the tasks of the mean query loss at theta_t: a scalar, whose gradient
        is the sum of the tasks' meta-gradients."""
        theta = inner_loop.start(rows, tasks, self.second_order)  # of all tasks at once
        for _ in range(inner_loop.config.inner_steps):
            theta = inner_loop.step(theta, self.second_order)  # theta - a grad L_support,t(theta)
        return inner_loop.query_loss_sum(theta, tasks)


MAML = Algorithm(QueryLoss(second_order=True))
