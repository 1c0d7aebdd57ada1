"""Reptile: theta moves towards where the tasks' inner steps went; no query set, first order.

    theta_t = k steps of  theta <- theta - a grad L_support,t(theta)   from theta,
    meta-gradient = mean_t (theta - theta_t)

Nichol et al., "On First-Order Meta-Learning Algorithms", arXiv 1803.02999, batched, and neither
divided by a nor by k; with outer SGD at rate e it is their theta <- theta + e mean_t (theta_t -
theta). Departures: theta_t is of the support rows alone, as data sets keep their split, and the
query rows serve the reported loss, to which tasks without them add 0 (Episodes.num_reported). What
does not adapt (adapt_layers, adapt_embeddings, gates) takes the gradient of the same sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.rates import FixedRates
from gmeta.errors import ConfigError
from gmeta.losses.row_losses import weighted_sum

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gmeta.adaptation.general_loop import GeneralLoop
    from gmeta.adaptation.layout.sides import Sides, WorkingRows
    from gmeta.config.algorithm import AlgorithmConfig


def reptile_loss_sum(inner_loop: GeneralLoop, rows: WorkingRows, tasks: Sides) -> Tensor:
    """Return the sum of the tasks' query losses at theta_t, whose gradient is the sum of theta -
    theta_t. Raises ConfigError: there is more than one rate."""
    rates = inner_loop.rates
    if not isinstance(rates, FixedRates):
        raise ConfigError(
            f"Reptile's loss_sum with {type(rates).__name__}: theta - theta_t is its gradient only "
            "at one FixedRates for all that adapts. Leave out the algorithm's rates, or give it a "
            "loss_sum of its own"
        )
    support, query = tasks
    longest = query.layout.longest
    # theta - theta_t = a sum_j grad L_support,t(theta_j): with theta_j a constant away from theta,
    # it is the gradient of a sum_j L_support,t(theta_j), for layers and embedding rows alike.
    adapted = inner_loop.take_steps(rows, support, longest, second_order=False, keep_path=True)
    with torch.no_grad():
        losses_N = inner_loop.losses_N(adapted, query)
        counted_N = query.layout.spread(support.layout.lengths_T > 0)
        weights_N = query.layout.mean_weights_N(losses_N.dtype)
        reported = weighted_sum(losses_N * counted_N, weights_N)
    # The value is the query loss, the gradient that of the path: pull - pull.detach() is 0, and its
    # gradient is not. `reported * 0.0` starts the sum where no task has support rows.
    pull = sum(adapted.support_loss_sums, reported * 0.0) * rates.rate
    return reported + pull - pull.detach()


def one_rate(model: nn.Module, config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the config unchanged. Raises ValueError: the last bias has a rate of its own."""
    # theta - theta_t is a gradient only at one rate for all.
    if config.bias_rate != 1.0:
        raise ValueError(
            f'algorithm.bias_rate = {config.bias_rate} with algorithm.name = "reptile": Reptile '
            "takes one rate for all that adapts. Leave bias_rate out, or set algorithm.name = "
            '"maml" or "fomaml"'
        )
    return config


REPTILE = Algorithm(reptile_loss_sum, preset=one_rate, learns_from="support")
