"""MAML: the gradient of the query loss through the inner steps, second order and exact.

    min over theta of  mean_t L_query,t(theta_t),   theta_t = k steps of  theta <- theta - a grad
                                                               L_support,t(theta)   from theta

Finn et al., "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", arXiv 1703.03400.
Departs from the paper in nothing; adapt_layers and adapt_embeddings can leave parameters out of the
inner steps, which are then meta-parameters only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gmeta.adaptation.algorithm import Algorithm

if TYPE_CHECKING:
    from gmeta.adaptation.inner_loop import InnerLoop, WorkingRows
    from gmeta.adaptation.side import Side


def maml_loss_sum(inner: InnerLoop, rows: WorkingRows, support: Side, query: Side) -> Tensor:
    """Sum over the tasks of the mean query loss at theta_t, differentiable through the steps."""
    adapted = inner.adapt(rows, support, query.layout.longest, second_order=True)
    return inner.loss_sum(adapted, query)


MAML = Algorithm(maml_loss_sum, query_loss_of="second order")
