"""FOMAML: MAML with the inner gradients as constants.

    meta-gradient = mean_t grad L_query,t  at theta_t

The Jacobian d theta_t / d theta of MAML is replaced by the identity: what theta does to the inner
gradients is dropped, so a step costs what plain training on the same rows costs. Finn et al., arXiv
1703.03400, section 5.2. A parameter that does not adapt gets the query loss's gradient alone."""

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.algorithms.maml import QueryLoss

FOMAML = Algorithm(QueryLoss(second_order=False))
