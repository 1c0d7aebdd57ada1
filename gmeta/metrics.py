"""The metrics of an evaluation, exact and in O(n log n), with their conventions and sources.

Every metric is also written as sums over tasks, so that resampling tasks (gmeta.report.intervals)
is cheap. An undefined value is NaN with its reason, never a number that looks like one.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

# N rows, T tasks, R runs of equal sort keys

Loss: TypeAlias = Literal["bce", "mse", "huber", "mae"]
Gain: TypeAlias = Literal["linear", "exponential"]
Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# A rating of 4 or 5 of 5 counts as liked, as in the MovieLens ranking literature.
POSITIVE_RATING = 4.0
# A float32 sigmoid rounds to exactly 0 or 1 for ordinary logits; scikit-learn clips there too.
LOGLOSS_CLIP = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class MetricInfo:
    """How a metric is named, read and compared."""

    label: str
    higher_is_better: bool
    unit: str
    explanation: str


@dataclass(frozen=True)
class Value:
    """A metric of one split over `num_tasks` tasks; NaN when undefined, for the `reason` given."""

    value: float
    num_tasks: int
    reason: str = ""


@dataclass(frozen=True)
class Terms:
    """One metric as sums over tasks: value = num_T.sum() / den_T.sum(), its root if `is_root`.

    A task with den_T = 0 does not count (for GAUC, one that holds a single class).
    """

    value: float
    num_T: Floats
    den_T: Floats
    is_root: bool = False
    reason: str = ""

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks that count."""
        return int(np.count_nonzero(self.den_T))


@dataclass(frozen=True)
class RankedRows:
    """Rows sorted by task, then by score, each with the bounds of its task and of its ties."""

    label_N: Floats
    task_N: Ints
    task_first_N: Ints
    task_end_N: Ints
    tie_first_N: Ints
    tie_end_N: Ints
    num_tasks: int


def auc(label: Array, score: Array) -> float:
    """Return the area under the ROC curve: P(a positive scores above a negative), ties half.

    A positive has a label of at least 0.5. NaN when a class is missing or a score is not finite.

    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
    0.875
    """
    label_N, score_N, _ = _checked(label, score, np.zeros(np.shape(label), np.int64))
    return _auc_terms(label_N >= 0.5, score_N, np.zeros(label_N.size, np.int64), 1).value


def gauc(label: Array, score: Array, task: Array) -> float:
    """Return the mean of the AUC inside each task, weighted by its rows (its impressions).

        GAUC = sum_t n_t AUC_t / sum_t n_t     over the tasks that hold both classes

    Zhou et al., Deep Interest Network (KDD 2018), section 6.3. The paper is silent on tasks of one
    class, which have no AUC: they count neither above nor below. NaN when no task holds both.

    >>> score = np.array([0.1, 0.9, 0.8, 0.3, 0.4])
    >>> gauc(np.array([0, 1, 0, 1, 1]), score, np.array([7, 7, 8, 8, 8]))
    0.4
    """
    label_N, score_N, task_N = _checked(label, score, task)
    ids_T, code_N = np.unique(task_N, return_inverse=True)
    return _gauc_terms(rank_within_tasks(label_N, score_N, code_N, ids_T.size), 0.5).value


def ndcg_at_k(label: Array, score: Array, task: Array, k: int, gain: Gain = "linear") -> float:
    """Return the normalised discounted cumulative gain of a task's k best rows, mean over tasks.

        DCG@k = sum_{r <= k} g(label_r) / log2(1 + r),  nDCG@k = DCG@k / (DCG@k of the ideal order)

    g(label) = label for `linear` (Jarvelin & Kekalainen 2002, and this project's reports),
    2^label - 1 for `exponential` (Burges et al. 2005). Both are in use for cold-start work: compare
    only like with like. Rows with equal scores get the expectation over their orders (McSherry &
    Najork 2008), so that a constant model earns no luck. Tasks without any gain are left out; NaN
    when none is left or a label is negative.

    >>> ndcg_at_k(np.array([5.0, 4.0]), np.array([0.2, 0.7]), np.array([1, 1]), k=1)
    0.8
    """
    label_N, score_N, task_N = _checked(label, score, task)
    if k < 1:
        raise ValueError(f"nDCG@{k} does not exist: k must be at least 1. Pass k >= 1.")
    ids_T, code_N = np.unique(task_N, return_inverse=True)
    ranked = rank_within_tasks(label_N, score_N, code_N, ids_T.size)
    ideal = rank_within_tasks(label_N, label_N, code_N, ids_T.size)
    return _ndcg_terms(ranked, ideal, k, gain).value


def logloss(label: Array, probability: Array) -> float:
    """Return the mean negative log-likelihood in nats, clipped at the epsilon of float32."""
    label_N, probability_N, _ = _checked(label, probability, np.zeros(np.shape(label), np.int64))
    return _mean(_logloss_N(label_N, probability_N))


def mae(label: Array, prediction: Array) -> float:
    """Return the mean absolute error over all rows, in the label's unit."""
    label_N, prediction_N, _ = _checked(label, prediction, np.zeros(np.shape(label), np.int64))
    return _mean(np.abs(prediction_N - label_N))


def rmse(label: Array, prediction: Array) -> float:
    """Return the root of the mean squared error over all rows, in the label's unit."""
    label_N, prediction_N, _ = _checked(label, prediction, np.zeros(np.shape(label), np.int64))
    return float(np.sqrt(_mean(np.square(prediction_N - label_N))))


def metric_infos(loss: Loss) -> dict[str, MetricInfo]:
    """Return the metrics reported for a loss, the headline metric first."""
    liked = "" if loss == "bce" else f" (rating \N{GREATER-THAN OR EQUAL TO} {POSITIVE_RATING:g})"
    ranking = {
        "auc": MetricInfo(
            f"AUC{liked}",
            True,
            "",
            "Chance that a positive row scores above a negative one; 0.5 is guessing.",
        ),
        "gauc": MetricInfo(
            f"GAUC{liked}",
            True,
            "",
            "AUC inside each task, averaged with the task's rows as weights, over the tasks that "
            "hold both classes (Zhou et al., Deep Interest Network, 2018).",
        ),
    }
    if loss == "bce":
        clip = f"Mean negative log-likelihood, probabilities clipped at {LOGLOSS_CLIP:.1e}."
        return {**ranking, "logloss": MetricInfo("Logloss", False, "nats", clip)}
    gain = (
        "DCG with gain = rating, discount log2(1 + rank), over the ideal order's; mean over tasks."
    )
    return {
        "mae": MetricInfo("MAE", False, "rating points", "Mean absolute error over all rows."),
        "rmse": MetricInfo(
            "RMSE", False, "rating points", "Root of the mean squared error over all rows."
        ),
        "ndcg@1": MetricInfo("nDCG@1", True, "", gain),
        "ndcg@3": MetricInfo("nDCG@3", True, "", gain),
        **ranking,
    }


def evaluate_split(label: Array, prediction: Array, task: Array, loss: Loss) -> dict[str, Value]:
    """Return every metric of the loss on one split.

    label_N, prediction_N (probabilities for bce, ratings for mse) and task_N (any integers) are
    aligned rows. Raises ValueError where their shapes differ.
    """
    terms = split_terms(label, prediction, task, loss)
    return {name: Value(one.value, one.num_tasks, one.reason) for name, one in terms.items()}


def split_terms(
    label: Array, prediction: Array, task: Array, loss: Loss, names: Sequence[str] = ()
) -> dict[str, Terms]:
    """Return the metrics of a split as sums over its tasks, by rising id; `names` picks some."""
    label_N, score_N, task_N = _checked(label, prediction, task)
    ids_T, code_N = np.unique(task_N, return_inverse=True)
    chosen = tuple(names) or tuple(metric_infos(loss))
    reason = _unusable(score_N)
    if reason:
        return dict.fromkeys(chosen, _undefined(ids_T.size, reason))
    makers = _makers(label_N, score_N, code_N, ids_T.size, loss)
    return {name: makers[name]() for name in chosen}


def rank_within_tasks(label_N: Floats, score_N: Floats, code_N: Ints, num_tasks: int) -> RankedRows:
    """Sort rows by (task, score); code_N are dense task codes in [0, num_tasks)."""
    order_N = np.lexsort((score_N, code_N))
    task_N, sorted_N = code_N[order_N], score_N[order_N]
    new_task_N = _changes(task_N)
    tie_first_N, tie_end_N = _run_bounds(new_task_N | _changes(sorted_N))
    task_first_N, task_end_N = _run_bounds(new_task_N)
    return RankedRows(
        label_N[order_N], task_N, task_first_N, task_end_N, tie_first_N, tie_end_N, num_tasks
    )


def _checked(label: Array, score: Array, task: Array) -> tuple[Floats, Floats, Ints]:
    shapes = (np.shape(label), np.shape(score), np.shape(task))
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"label, prediction and task have the shapes {shapes}: they must be one-dimensional "
            "and equally long, one entry per row. Pass the columns of one table."
        )
    return np.asarray(label, np.float64), np.asarray(score, np.float64), np.asarray(task, np.int64)


def _unusable(score_N: Floats) -> str:
    if score_N.size == 0:
        return "no rows"
    num_bad = int(np.count_nonzero(~np.isfinite(score_N)))
    return (
        f"{num_bad:,} of {score_N.size:,} predictions are not finite: the model diverged"
        if num_bad
        else ""
    )


def _undefined(num_tasks: int, reason: str) -> Terms:
    zeros_T = np.zeros(num_tasks)
    return Terms(np.nan, zeros_T, zeros_T, reason=reason)


def _makers(
    label_N: Floats, score_N: Floats, code_N: Ints, num_tasks: int, loss: Loss
) -> dict[str, Callable[[], Terms]]:
    threshold = 0.5 if loss == "bce" else POSITIVE_RATING
    error_N = score_N - label_N

    @functools.cache  # the sort is most of the work, and three metrics share it
    def ranked() -> RankedRows:
        return rank_within_tasks(label_N, score_N, code_N, num_tasks)

    @functools.cache
    def ideal() -> RankedRows:
        return rank_within_tasks(label_N, label_N, code_N, num_tasks)

    return {
        "auc": lambda: _auc_terms(label_N >= threshold, score_N, code_N, num_tasks),
        "gauc": lambda: _gauc_terms(ranked(), threshold),
        "logloss": lambda: _row_mean_terms(_logloss_N(label_N, score_N), code_N, num_tasks),
        "mae": lambda: _row_mean_terms(np.abs(error_N), code_N, num_tasks),
        "rmse": lambda: _row_mean_terms(np.square(error_N), code_N, num_tasks, is_root=True),
        "ndcg@1": lambda: _ndcg_terms(ranked(), ideal(), 1, "linear"),
        "ndcg@3": lambda: _ndcg_terms(ranked(), ideal(), 3, "linear"),
    }


def _auc_terms(positive_N: Bools, score_N: Floats, code_N: Ints, num_tasks: int) -> Terms:
    """Return the pooled AUC; a task's term is the AUC plus its influence on it, over all pairs.

    With the placement V of a row (the share of the other class that it is rightly ordered against),
    the derivative of the AUC by the weight of task t is, over the rows of t,
        sum_pos (V - AUC) / n_pos + sum_neg (V - AUC) / n_neg
    (Obuchowski 1997, Nonparametric analysis of clustered ROC curve data).
    """
    num_positive = int(np.count_nonzero(positive_N))
    num_negative = positive_N.size - num_positive
    reason = _unusable(score_N) or _one_class(num_positive, num_negative)
    if reason:
        return _undefined(num_tasks, reason)
    order_N = np.argsort(score_N, kind="stable")
    first_N, end_N = _run_bounds(_changes(score_N[order_N]))
    beaten_N = np.empty(score_N.size, np.int64)
    beaten_N[order_N] = _beaten_twice(positive_N[order_N], first_N, end_N)
    pairs = num_positive * num_negative
    # Counted in half pairs up to here: whole numbers, exact however many rows there are.
    value = int(beaten_N[positive_N].sum()) / (2 * pairs)
    weight_N = np.where(positive_N, 1.0 / num_positive, 1.0 / num_negative)
    placement_N = beaten_N / np.where(positive_N, 2.0 * num_negative, 2.0 * num_positive)
    influence_T = _sum_T(weight_N * (placement_N - value), code_N, num_tasks)
    return Terms(value, value + num_tasks * influence_T, np.ones(num_tasks))


def _beaten_twice(positive_N: Bools, first_N: Ints, end_N: Ints) -> Ints:
    """Return twice the rows of the other class that a row is rightly ordered against, ties once."""
    positives_before = np.concatenate(([0], np.cumsum(positive_N)))
    negatives_before = np.concatenate(([0], np.cumsum(~positive_N)))
    below_N = negatives_before[first_N] + negatives_before[end_N]
    above_N = 2 * positives_before[-1] - positives_before[first_N] - positives_before[end_N]
    return np.where(positive_N, below_N, above_N)


def _one_class(num_positive: int, num_negative: int) -> str:
    if num_positive and num_negative:
        return ""
    return f"{num_positive:,} positive and {num_negative:,} negative rows: both classes are needed"


def _gauc_terms(ranked: RankedRows, threshold: float) -> Terms:
    positive_N = ranked.label_N >= threshold
    negatives_before = np.concatenate(([0], np.cumsum(~positive_N)))
    # Twice the negatives below each row, of its own task alone; ties count once.
    tied = negatives_before[ranked.tie_first_N] + negatives_before[ranked.tie_end_N]
    beaten_N = tied - 2 * negatives_before[ranked.task_first_N]
    rows_T = np.bincount(ranked.task_N, minlength=ranked.num_tasks)
    positives_T = np.bincount(ranked.task_N[positive_N], minlength=ranked.num_tasks)
    pairs_T = positives_T * (rows_T - positives_T)
    # As everywhere here: NaN with its reason, where a 0 or a half would pass for a score.
    if not pairs_T.any():
        return _undefined(ranked.num_tasks, "no task holds both classes")
    won_T = _sum_T(np.where(positive_N, beaten_N, 0), ranked.task_N, ranked.num_tasks)
    # Tasks of one class weigh nothing below; the 1 keeps them from dividing by 0.
    auc_T = won_T / np.maximum(2 * pairs_T, 1)
    den_T = np.where(pairs_T > 0, rows_T, 0).astype(np.float64)
    return Terms(float((auc_T * den_T).sum() / den_T.sum()), auc_T * den_T, den_T)


def _ndcg_terms(ranked: RankedRows, ideal: RankedRows, k: int, gain: Gain) -> Terms:
    if ranked.label_N.size and ranked.label_N.min() < 0:
        return _undefined(ranked.num_tasks, "labels below 0 have no gain")
    ideal_T = _dcg_T(ideal, k, gain)
    den_T = (ideal_T > 0).astype(np.float64)
    if not den_T.any():
        return _undefined(ranked.num_tasks, "no task holds a row with gain")
    num_T = _dcg_T(ranked, k, gain) / np.where(ideal_T > 0, ideal_T, 1.0)
    return Terms(float(num_T.sum() / den_T.sum()), num_T, den_T)


def _dcg_T(ranked: RankedRows, k: int, gain: Gain) -> Floats:
    discount_before = np.concatenate(([0.0], np.cumsum(1.0 / np.log2(np.arange(2, k + 2)))))
    best_N = ranked.task_end_N - ranked.tie_end_N
    worst_N = ranked.task_end_N - ranked.tie_first_N
    total_N = discount_before[np.minimum(worst_N, k)] - discount_before[np.minimum(best_N, k)]
    gain_N = ranked.label_N if gain == "linear" else np.exp2(ranked.label_N) - 1.0
    # Tied rows stand at each of their ranks with equal chance: each gets the mean discount.
    return _sum_T(gain_N * total_N / (worst_N - best_N), ranked.task_N, ranked.num_tasks)


def _row_mean_terms(row_N: Floats, code_N: Ints, num_tasks: int, is_root: bool = False) -> Terms:
    mean = _mean(row_N)
    num_T, den_T = _sum_T(row_N, code_N, num_tasks), _sum_T(np.ones(row_N.size), code_N, num_tasks)
    return Terms(float(np.sqrt(mean)) if is_root else mean, num_T, den_T, is_root)


def _sum_T(row_N: Array, code_N: Ints, num_tasks: int) -> Floats:
    return np.asarray(np.bincount(code_N, row_N, minlength=num_tasks), np.float64)


def _logloss_N(label_N: Floats, probability_N: Floats) -> Floats:
    clipped_N = np.clip(probability_N, LOGLOSS_CLIP, 1.0 - LOGLOSS_CLIP)
    # log1p, since 1 - p is 1 for the smallest p.
    return -(label_N * np.log(clipped_N) + (1.0 - label_N) * np.log1p(-clipped_N))


def _mean(row_N: Floats) -> float:
    return float(row_N.mean()) if row_N.size else float("nan")


def _changes(key_N: Array) -> Bools:
    # The first row begins a run, where there is a first row.
    return np.concatenate((np.ones(min(key_N.size, 1), np.bool_), key_N[1:] != key_N[:-1]))


def _run_bounds(starts_N: Bools) -> tuple[Ints, Ints]:
    """Return the first index of each row's run and one past its last; starts_N marks the starts."""
    first_R = np.flatnonzero(starts_N)
    end_R = np.append(first_R[1:], starts_N.size)
    length_R = end_R - first_R
    return np.repeat(first_R, length_R), np.repeat(end_R, length_R)
