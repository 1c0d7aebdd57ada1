"""What a model can win on the synthetic recipe at best, with and without adapting to a user's
support rows.

Shape suffixes: T tasks, N rows, D embedding width, A items"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metaio.recipes.synthetic import (
    TASTE_SCALE,
    Float,
    SyntheticConfig,
    draw_tastes,
    draw_users,
    make_world,
    sigmoid,
)


@dataclass(frozen=True)
class Oracle:
    """AUC on query rows of new users that no model of its kind can beat, but for noise."""

    without_adaptation: (
        float  # knows every item and the population of tastes, not this user's taste
    )
    after_support: float  # also has the posterior of this user's taste given the support rows
    knows_taste: float  # knows P(click) itself


def oracle(
    config: SyntheticConfig, num_users: int = 500, num_tastes: int = 3_000, cold_items: bool = False
) -> Oracle:
    """Estimate what there is to win on new users, by Monte Carlo over `num_tastes` tastes."""
    world = make_world(config)
    # Numbers that no split reaches: users that no model was trained on.
    draw = draw_users(config, world, 1 << 30, num_users, cold_items)
    rng = np.random.default_rng([config.seed, 5])
    clicks_N = rng.random(len(draw.item_N)) < draw.click_probability_N
    tastes = draw_tastes(rng, world, num_tastes)
    population_N, posterior_N = np.empty(len(clicks_N)), np.empty(len(clicks_N))
    query_N = np.zeros(len(clicks_N), dtype=np.bool_)
    ends_T = np.cumsum(draw.lengths_T)
    for end, length in zip(ends_T.tolist(), draw.lengths_T.tolist(), strict=True):
        rows, support = slice(end - length, end), slice(end - length, end - config.query_rows)
        # Bayes by sampling: each taste of the population is a guess, weighed by the support rows.
        logits = TASTE_SCALE * tastes @ world.item_latent_AD[draw.item_N[rows]].T
        probability = sigmoid(logits + draw.visible_logit_N[rows])
        seen = probability[:, : length - config.query_rows]
        log_likelihood = np.log(np.where(clicks_N[support], seen, 1.0 - seen)).sum(axis=1)
        # Relative to the best guess, or 30 factors below 1 would vanish.
        weight = np.exp(log_likelihood - log_likelihood.max())
        population_N[rows] = probability.mean(axis=0)
        posterior_N[rows] = weight @ probability / weight.sum()
        query_N[end - config.query_rows : end] = True
    scores = (population_N, posterior_N, draw.click_probability_N)
    return Oracle(*(_auc(score[query_N], clicks_N[query_N]) for score in scores))


def _auc(scores: Float, labels: npt.NDArray[np.bool_]) -> float:
    """Return probability that a random positive scores above a random negative, without ties."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positives = int(labels.sum())
    total = float(ranks[labels].sum()) - positives * (positives + 1) / 2
    return total / (positives * (len(labels) - positives))
