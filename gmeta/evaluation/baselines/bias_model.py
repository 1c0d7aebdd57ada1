"""The bias model: the mean, plus the effect of the item, plus the effect of the task.

Ratings, and labels beside scores (Koren, Factor in the Neighbors, TKDD 2010, section 2.1):

    y = mu + a_i + b_t,   a_i = sum_{rows of i} (y - mu) / (n_i + item_prior)
                          b_t = sum_{support of t} (y - mu - a_i) / (m_t + task_prior)

Clicks, on log-odds, so that probabilities stay calibrated: p = sigmoid(logit(mu) + a_i + b_t), each
effect the most probable one under a normal prior around 0 of precision `prior`,

    sum (y - p) = prior * a_i  over the rows of i,   = prior * b_t  over the support of t.

mu and a_i come from the training split, b_t from the support rows of the task that is predicted.
Shape suffixes: T tasks, N rows, S support rows, F single-id or pooled features"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gmeta.config.losses import Loss
from gmeta.data.sums import log_odds
from gmeta.evaluation.baselines.episode_rows import NO_ITEM, EpisodeRows, Floats
from gmeta.evaluation.baselines.training_sums import NO_FOLD, TrainingSums, assign_folds
from gmeta.metrics.catalogue import predicted_by
from gmeta.metrics.scores import logloss, mae
from gmeta.metrics.terms import mean_of
from metaio.ragged import Int64

# In rows: from "a single row is believed" to "hundreds are needed".
PRIORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# Fewer priors are enough to find out which column is the item.
COARSE_PRIORS = (2.0, 8.0, 32.0)
# Newton's method stops earlier, where the gradient is 0: this many steps are far more than it
# takes.
NEWTON_STEPS = 60


@dataclass(frozen=True)
class BiasModel:
    """A model: `item` is an index into Features.single, or NO_ITEM."""

    loss: Loss
    item: int
    item_prior: float
    task_prior: float

    def without_task(self, sums: TrainingSums, ids_N: Int64, fold_N: Int64) -> Floats:
        """Return mu + a_i of each row (log-odds for bce), from all folds but the row's own."""
        if self.item == NO_ITEM:
            return np.full(len(ids_N), base_output(self.loss, sums.mean))
        counts_N, sums_N = sums.columns[self.item].leave_fold_out(ids_N, fold_N)
        return self.fit_item_levels(counts_N, sums_N, sums.mean)

    def fit_item_levels(self, counts_N: Floats, sums_N: Floats, mean: float) -> Floats:
        """Return mu + a_i of items with these numbers of rows and label sums."""
        mu = base_output(self.loss, mean)
        if self.loss != "bce":
            return mu + (sums_N - counts_N * mean) / (counts_N + self.item_prior)
        # All rows of an item have one level: nothing but the item is known of them.
        level_N, each_N = np.full(len(counts_N), mu), np.arange(len(counts_N))
        return mu + _fit_effects(self.item_prior, level_N, each_N, counts_N, sums_N, len(counts_N))

    def fit_task_effects(self, level_N: Floats, rows: EpisodeRows) -> Floats:
        """Return b_t of each episode from its support rows, with mu + a_i in `level_N`."""
        support_N = rows.is_support_N
        episode_S = rows.episode_N[support_N]
        label_S, level_S = rows.label_N[support_N], level_N[support_N]
        num_episodes, ones_S = len(rows.task_T), np.ones(len(label_S))
        if self.loss == "bce":
            return _fit_effects(self.task_prior, level_S, episode_S, ones_S, label_S, num_episodes)
        above_T = np.bincount(episode_S, label_S - level_S, minlength=num_episodes)
        return above_T / (np.bincount(episode_S, minlength=num_episodes) + self.task_prior)

    def output_N(self, level_N: Floats, rows: EpisodeRows) -> Floats:
        """Return mu + a_i + b_t of every row, support rows too: log-odds for bce."""
        output: Floats = level_N + self.fit_task_effects(level_N, rows)[rows.episode_N]
        return output

    def predict(self, sums: TrainingSums, rows: EpisodeRows) -> Floats:
        """Return the prediction of every row of unseen tasks: a probability for bce."""
        level_N = self.without_task(sums, rows.ids_of(self.item), np.full(rows.num_rows, NO_FOLD))
        return to_predictions(self.loss, self.output_N(level_N, rows))


def _fit_effects(
    prior: float, levels: Floats, owners: Int64, rows: Floats, clicks: Floats, number: int
) -> Floats:
    """Return the most probable effect of each owner of rows and clicks at the log-odds `levels`."""
    effects = np.zeros(number)
    for _ in range(NEWTON_STEPS):
        p = sigmoid(levels + effects[owners])
        gradient = np.bincount(owners, clicks - rows * p, number) - prior * effects
        hessian = np.bincount(owners, rows * p * (1 - p), number) + prior
        # A full step may end where sigmoids are flat, from where the next one runs away: an item
        # with many rare clicks. Steps of at most 1 always gain, as |f'''| <= |f''| (Bach,
        # Self-concordant analysis for logistic regression, 2010).
        step = np.clip(gradient / hessian, -1.0, 1.0)
        effects += step
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    return effects


def choose_bias(
    loss: Loss, sums: TrainingSums, judges: Sequence[EpisodeRows], item: int | None, seed: int
) -> BiasModel:
    """Return the model (its item too if `item` is None) that predicts `judges` best."""
    # Judged by training tasks of other folds: it does no harm if a validation task is among those.
    columns = [item] if item is not None else [NO_ITEM, *range(judges[0].ids_NF.shape[1])]
    if len(columns) > 1:
        # The column by whose means the rows are predicted best; none, where no column helps.
        columns = [
            min(
                columns,
                key=lambda one: _search_priors(loss, sums, judges, one, seed, COARSE_PRIORS)[0],
            )
        ]
    return _search_priors(loss, sums, judges, columns[0], seed, PRIORS)[1]


def _search_priors(
    loss: Loss,
    sums: TrainingSums,
    judges: Sequence[EpisodeRows],
    item: int,
    seed: int,
    priors: tuple[float, ...],
) -> tuple[float, BiasModel]:
    # Without an item there is no item prior to choose.
    item_priors = priors if item != NO_ITEM else priors[:1]
    errors: dict[BiasModel, float] = {}
    for rows in judges:
        query_N, ids_N = ~rows.is_support_N, rows.ids_of(item)
        fold_N, label_N = assign_folds(rows.task_T, seed)[rows.episode_N], rows.label_N[query_N]
        for item_prior in item_priors:
            level_N = BiasModel(loss, item, item_prior, 0.0).without_task(sums, ids_N, fold_N)
            for task_prior in priors:
                model = BiasModel(loss, item, item_prior, task_prior)
                predicted_N = to_predictions(loss, model.output_N(level_N, rows)[query_N])
                share = mean_error(loss, label_N, predicted_N) / len(judges)
                errors[model] = errors.get(model, 0.0) + share
    best = min(errors, key=lambda model: errors[model])
    return errors[best], best


def mean_error(loss: Loss, label_N: Floats, predicted_N: Floats) -> float:
    """Return the error by which a model is chosen: logloss, mean absolute or mean squared error."""
    # Of rare clicks the absolute error is least for a prediction of no click at all.
    if predicted_by(loss) == "score":
        return mean_of(np.square(label_N - predicted_N))
    return (logloss if loss == "bce" else mae)(label_N, predicted_N)


def base_output(loss: Loss, mean: float) -> float:
    """Return the mean label as a model's output: its log-odds, kept finite, for bce."""
    return float(log_odds(mean)) if loss == "bce" else mean


def sigmoid(logit_N: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    # By tanh, which does not overflow.
    values: Floats = 0.5 * (1.0 + np.tanh(0.5 * logit_N))
    return values


def to_predictions(loss: Loss, output_N: Floats) -> Floats:
    """Return outputs as a report shows them: probabilities for bce, ratings as they are."""
    return sigmoid(output_N) if loss == "bce" else output_N
