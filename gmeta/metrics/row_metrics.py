"""Metrics of all rows of a split together: AUC, average precision, calibration, errors."""

import numpy as np

from gmeta.metrics.terms import (
    ECE_BINS,
    LOGLOSS_CLIP,
    Bools,
    Floats,
    Ints,
    Terms,
    run_bounds,
    sum_T,
    undefined_terms,
    why_one_class,
    why_unusable,
    with_influence,
)
from metaio.ragged import find_run_starts

# N rows, T tasks, X bins


def auc_terms(positive_N: Bools, score_N: Floats, code_N: Ints, num_tasks: int) -> Terms:
    """Return the pooled AUC; a task's term is the AUC plus the task's influence on it, over all
    pairs.

    With the placement V of a row (the share of the other class that it is rightly ordered against),
    the derivative of the AUC by the weight of task t is, over the rows of t,

        sum_pos (V - AUC) / n_pos + sum_neg (V - AUC) / n_neg

    (Obuchowski 1997, Nonparametric analysis of clustered ROC curve data)."""
    num_positive = int(np.count_nonzero(positive_N))
    num_negative = positive_N.size - num_positive
    reason = why_unusable(score_N) or why_one_class(num_positive, num_negative)
    if reason:
        return undefined_terms(num_tasks, reason)
    order_N = np.argsort(score_N, kind="stable")
    first_N, end_N = run_bounds(find_run_starts(score_N[order_N]))
    beaten_N = np.empty(score_N.size, np.int64)
    beaten_N[order_N] = _count_beaten_twice(positive_N[order_N], first_N, end_N)
    pairs = num_positive * num_negative
    # Counted in half pairs up to here: whole numbers, exact however many rows there are.
    value = int(beaten_N[positive_N].sum()) / (2 * pairs)
    weight_N = np.where(positive_N, 1.0 / num_positive, 1.0 / num_negative)
    placement_N = beaten_N / np.where(positive_N, 2.0 * num_negative, 2.0 * num_positive)
    influence_T = sum_T(weight_N * (placement_N - value), code_N, num_tasks)
    return with_influence(value, influence_T, _count_rarer_tasks(positive_N, code_N))


def pr_auc_terms(positive_N: Bools, score_N: Floats, code_N: Ints, num_tasks: int) -> Terms:
    """Return the pooled average precision: the precision at each positive row's score, averaged.

        AP = sum_(i positive) P(s_i) / n_pos,   P(s) = positives scored s or more / rows scored so

    which is the area under the precision-recall curve by steps, without interpolation
    (scikit-learn's average_precision_score; Davis & Goadrich 2006 on why not by straight lines).
    The derivative by the weight of row j, with n(s) rows and p(s) positives scored s or more, is
        ([j positive] (P(s_j) - AP) + sum_(i positive, s_i <= s_j) ([j positive] / n(s_i)
         - p(s_i) / n(s_i)^2)) / n_pos"""
    num_positive = int(np.count_nonzero(positive_N))
    reason = why_unusable(score_N) or why_one_class(num_positive, positive_N.size - num_positive)
    if reason:
        return undefined_terms(num_tasks, reason)
    order_N = np.argsort(score_N, kind="stable")
    first_N, end_N = run_bounds(find_run_starts(score_N[order_N]))
    ordered_N = positive_N[order_N]
    positives_before = np.concatenate(([0], np.cumsum(ordered_N)))
    rows_N = (positive_N.size - first_N).astype(np.float64)
    precision_N = (num_positive - positives_before[first_N]) / rows_N
    value = float(precision_N[ordered_N].mean())
    # Sums over the positive rows that score no more: up to the end of a row's tie.
    gains = np.concatenate(([0.0], np.cumsum(ordered_N / rows_N)))[end_N]
    losses = np.concatenate(([0.0], np.cumsum(ordered_N * precision_N / rows_N)))[end_N]
    influence_N = (ordered_N * (precision_N - value + gains) - losses) / num_positive
    influence_T = sum_T(influence_N, code_N[order_N], num_tasks)
    return with_influence(value, influence_T, _count_rarer_tasks(positive_N, code_N))


def ece_terms(label_N: Floats, probability_N: Floats, code_N: Ints, num_tasks: int) -> Terms:
    """Return the expected calibration error: the distance between predicted probabilities and
    labels, in 15 bins of equal width.

        ECE = sum_b (n_b / N) |mean label of bin b - mean probability of bin b|

    Bins are open below and closed above (Naeini et al. 2015; Guo et al. 2017, On Calibration of
    Modern Neural Networks, equation 3)."""
    reason = why_unusable(probability_N)
    if reason:
        return undefined_terms(num_tasks, reason)
    edges = np.linspace(0.0, 1.0, ECE_BINS + 1)[1:-1]
    bin_N = np.digitize(probability_N, edges, right=True)
    excess_N = label_N - probability_N
    excess_X = np.bincount(bin_N, excess_N, minlength=ECE_BINS)
    # The sign of each bin's difference stays, so the interval of two models' difference holds to
    # first order. One of the value would not: noise in a bin always adds to it, and of 60 tasks,
    # 400 rows, such an interval held the truth 37 times of 100.
    num_T = sum_T(np.sign(excess_X)[bin_N] * excess_N, code_N, num_tasks)
    den_T = sum_T(np.ones(label_N.size), code_N, num_tasks)
    value = float(np.abs(excess_X).sum() / label_N.size)
    return Terms(value, num_T, den_T, no_interval="noise in its bins only adds to it")


def logloss_N(label_N: Floats, probability_N: Floats) -> Floats:
    """Return each row's negative log-likelihood in nats, clipped at the epsilon of float32."""
    clipped_N = np.clip(probability_N, LOGLOSS_CLIP, 1.0 - LOGLOSS_CLIP)
    # log1p, since 1 - p is 1 for the smallest p.
    return -(label_N * np.log(clipped_N) + (1.0 - label_N) * np.log1p(-clipped_N))


def _count_rarer_tasks(positive_N: Bools, code_N: Ints) -> int:
    # With five tasks of the rarer class in 200, a 95 % interval of the AUC holds the truth 81 times
    # of 100, with one 6 times.
    classes = (code_N[positive_N], code_N[~positive_N])
    return min(int(np.count_nonzero(np.bincount(code_of_class))) for code_of_class in classes)


def _count_beaten_twice(positive_N: Bools, first_N: Ints, end_N: Ints) -> Ints:
    """Return twice the rows of the other class that a row is rightly ordered against, ties once."""
    positives_before = np.concatenate(([0], np.cumsum(positive_N)))
    negatives_before = np.concatenate(([0], np.cumsum(~positive_N)))
    below_N = negatives_before[first_N] + negatives_before[end_N]
    above_N = 2 * positives_before[-1] - positives_before[first_N] - positives_before[end_N]
    return np.where(positive_N, below_N, above_N)
