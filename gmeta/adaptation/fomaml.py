"""FOMAML: MAML with the inner gradients as constants.

    meta-gradient = mean_t grad L_query,t  at theta_t

The Jacobian d theta_t / d theta of MAML is replaced by the identity: what theta does to the inner
gradients is dropped, so a step costs what plain training on the same rows costs. Finn et al., arXiv
1703.03400, section 5.2. A parameter that does not adapt gets the query loss's gradient alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gmeta.adaptation.algorithm import Algorithm

if TYPE_CHECKING:
    from gmeta.adaptation.inner_loop import InnerLoop, WorkingRows
    from gmeta.adaptation.side import Side


def fomaml_loss_sum(inner: InnerLoop, rows: WorkingRows, support: Side, query: Side) -> Tensor:
    """Sum over the tasks of the mean query loss at theta + (a constant of the task)."""
    adapted = inner.adapt(rows, support, query.layout.longest, second_order=False)
    return inner.loss_sum(adapted, query)


FOMAML = Algorithm(fomaml_loss_sum, query_loss_of="first order")
