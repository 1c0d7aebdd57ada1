"""Ridge: the inner step is solved in closed form, for all layers that adapt at once.

    theta_t = theta - a J_t^T s_t,    (I + a H_t J_t J_t^T) s_t = g_t
    min over theta of  mean_t L_query,t(theta_t)

with the slopes g_t and curvatures H_t of the support losses at the outputs, whose Jacobians are
J_t, and a = inner_lr: closed_form.py. a is no longer a step's length but how far a task is expected
to lie from theta (the prior variance of each weight), so that more support rows move a task
further, up to where its outputs fit them. Of the squared error it is ridge regression, of bce one
Newton step of ridge logistic regression.

Bertinetto et al., "Meta-learning with differentiable closed-form solvers", ICLR 2019 (arXiv
1805.08136), whose R2-D2 is `adapt_layers` with the last layer alone; in the space of all layers'
gradients as Zhou et al., "Meta-Learning with Neural Tangent Kernels", AISTATS 2021 (arXiv
2102.03909). Departures: theta_t is the network with the weights moved, not its linearisation;
`inner_steps` solve anew from where the last one ended; a is not learned. Embedding rows do not
adapt, whatever adapt_embeddings says. The gradient flows through the solution, second order."""

from gmeta.adaptation.algorithms.algorithm import Algorithm, without_embeddings
from gmeta.adaptation.algorithms.maml import QueryLoss

RIDGE = Algorithm(QueryLoss(second_order=True), preset=without_embeddings, solves=True)
