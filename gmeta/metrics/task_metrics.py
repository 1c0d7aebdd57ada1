"""Metrics of the order of each task's rows: GAUC, nDCG, hits, precision, recall, MRR."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gmeta.metrics.terms import (
    Floats,
    Ints,
    Terms,
    mean_over_rows,
    mean_over_tasks,
    run_bounds,
    sum_T,
    undefined_terms,
)
from metaio.ragged import find_run_starts, owners, places

# N rows, T tasks, R ties: runs of rows of one task with equal scores


# Rows with equal scores stand in every order with equal chance, and each metric is its expectation
# over these orders (McSherry & Najork 2008, Computing information retrieval performance measures
# efficiently in the presence of tied scores): a constant model has no luck.
@dataclass(frozen=True)
class RankedRows:
    """Rows sorted by task, then by score, each with the bounds of its task and of its tie."""

    label_N: Floats
    task_N: Ints
    task_first_N: Ints
    task_end_N: Ints
    tie_first_N: Ints
    tie_end_N: Ints
    num_tasks: int


@dataclass(frozen=True)
class Ties:
    """The ties of ranked rows, of each task from its worst rows to its best."""

    task_R: Ints
    above_R: Ints  # rows of the task that score higher
    size_R: Ints
    positives_R: Ints
    num_tasks: int

    @cached_property
    def positives_T(self) -> Floats:
        """Return the number of positive rows of each task."""
        return sum_T(self.positives_R, self.task_R, self.num_tasks)

    @property
    def none(self) -> Terms | None:
        """Return the terms of a metric of positive rows where no task has one."""
        if self.positives_T.any():
            return None
        return undefined_terms(self.num_tasks, "no task holds a positive row")


def rank_within_tasks(label_N: Floats, score_N: Floats, code_N: Ints, num_tasks: int) -> RankedRows:
    """Return the rows sorted by (task, score); code_N are dense task codes in [0, num_tasks)."""
    order_N = np.lexsort((score_N, code_N))
    task_N, sorted_N = code_N[order_N], score_N[order_N]
    new_task_N = find_run_starts(task_N)
    tie_first_N, tie_end_N = run_bounds(new_task_N | find_run_starts(sorted_N))
    task_first_N, task_end_N = run_bounds(new_task_N)
    return RankedRows(
        label_N[order_N], task_N, task_first_N, task_end_N, tie_first_N, tie_end_N, num_tasks
    )


def find_ties(ranked: RankedRows, threshold: float) -> Ties:
    """Return the ties; a label of at least `threshold` is positive."""
    # The first row of a tie is where the tie begins.
    first_R = np.flatnonzero(ranked.tie_first_N == np.arange(ranked.tie_first_N.size))
    end_R = ranked.tie_end_N[first_R]
    # Sums over runs of rows as differences of one running sum.
    positives = np.concatenate(([0], np.cumsum(ranked.label_N >= threshold)))
    return Ties(
        task_R=ranked.task_N[first_R],
        above_R=ranked.task_end_N[first_R] - end_R,
        size_R=end_R - first_R,
        positives_R=positives[end_R] - positives[first_R],
        num_tasks=ranked.num_tasks,
    )


def gauc_terms(ranked: RankedRows, threshold: float) -> Terms:
    """Return the mean of the AUC inside each task, weighted by its rows (its impressions).

        GAUC = sum_t n_t AUC_t / sum_t n_t     over the tasks that hold both classes

    Zhou et al., Deep Interest Network (KDD 2018), section 6.3."""
    positive_N = ranked.label_N >= threshold
    negatives_before = np.concatenate(([0], np.cumsum(~positive_N)))
    # Twice the negatives below each row, of its own task alone; ties count once.
    tied = negatives_before[ranked.tie_first_N] + negatives_before[ranked.tie_end_N]
    beaten_N = tied - 2 * negatives_before[ranked.task_first_N]
    rows_T = np.bincount(ranked.task_N, minlength=ranked.num_tasks)
    positives_T = np.bincount(ranked.task_N[positive_N], minlength=ranked.num_tasks)
    # The paper is silent on tasks of one class, which have no AUC: they do not count.
    pairs_T = positives_T * (rows_T - positives_T)
    # As everywhere here: NaN with its reason, where a 0 or a half would pass for a score.
    if not pairs_T.any():
        return undefined_terms(ranked.num_tasks, "no task holds both classes")
    won_T = sum_T(np.where(positive_N, beaten_N, 0), ranked.task_N, ranked.num_tasks)
    # Tasks of one class weigh nothing below; the 1 keeps them from dividing by 0.
    auc_T = won_T / np.maximum(2 * pairs_T, 1)
    den_T = np.where(pairs_T > 0, rows_T, 0).astype(np.float64)
    return Terms(float((auc_T * den_T).sum() / den_T.sum()), auc_T * den_T, den_T)


def ndcg_terms(ranked: RankedRows, ideal: RankedRows, k: int) -> Terms:
    """Return the normalised discounted cumulative gain of a task's k best rows, mean over tasks.

        DCG@k = sum_{r <= k} label_r / log2(1 + r),  nDCG@k = DCG@k / (DCG@k of the ideal order)

    (Jarvelin & Kekalainen 2002.) With a gain of 2^label - 1 (Burges et al. 2005), in use for
    cold-start work too, it is another number: compare only like with like."""
    if ranked.label_N.size and ranked.label_N.min() < 0:
        return undefined_terms(ranked.num_tasks, "labels below 0 have no gain")
    ideal_T = _dcg_T(ideal, k)
    if not (ideal_T > 0).any():
        return undefined_terms(ranked.num_tasks, "no task holds a row with gain")
    return mean_over_tasks(_dcg_T(ranked, k) / np.where(ideal_T > 0, ideal_T, 1.0), ideal_T > 0)


def precision_terms(ties: Ties, k: int) -> Terms:
    """Return the share of positive rows among a task's k best, mean over the tasks with one."""
    # Always over k, as trec_eval's P_k: a task with fewer rows cannot reach 1.
    return ties.none or mean_over_tasks(_positives_found_T(ties, k) / k, ties.positives_T > 0)


def recall_terms(ties: Ties, k: int) -> Terms:
    """Return the share of a task's positive rows among its k best, mean over the tasks with one."""
    return ties.none or mean_over_tasks(
        _positives_found_T(ties, k) / np.maximum(ties.positives_T, 1), ties.positives_T > 0
    )


def hit_terms(ties: Ties, k: int) -> Terms:
    """Return the share of tasks with a positive row among their k best, of the tasks with one.

    HR@k, or hit@k: Deshpande & Karypis 2004, Item-based top-N recommendation algorithms, section 5;
    He et al. 2017, Neural Collaborative Filtering, section 4.1."""
    if ties.none is not None:
        return ties.none
    size_R, positives_R = ties.size_R, ties.positives_R
    # Hypergeometric: a tie misses with all of its rows that stand among the k best, in C(size -
    # positives, inside) of C(size, inside) orders.
    inside_R = np.clip(k - ties.above_R, 0, size_R)
    log_misses_R = _log_choose(size_R - positives_R, inside_R) - _log_choose(size_R, inside_R)
    miss_R = np.where(size_R - positives_R >= inside_R, np.exp(log_misses_R), 0.0)
    # At most one tie of a task lies across the border: all others surely miss, or surely do not.
    miss_T = np.ones(ties.num_tasks)
    np.minimum.at(miss_T, ties.task_R, miss_R)
    return mean_over_tasks(1.0 - miss_T, ties.positives_T > 0)


def mrr_terms(ties: Ties) -> Terms:
    """Return the mean of 1 / the rank of a task's best positive row (Voorhees 1999, The TREC-8
    Question Answering Track Report, section 3)."""
    if ties.none is not None:
        return ties.none
    # A task's last tie with a positive row is its best one; the first of them is the best row.
    held_R = np.flatnonzero(ties.positives_R)
    best_T = np.full(ties.num_tasks, -1)
    best_T[ties.task_R[held_R]] = held_R
    counts_T = best_T >= 0
    best = best_T[counts_T]
    size, positives, above = ties.size_R[best], ties.positives_R[best], ties.above_R[best]
    # P(the first positive stands at place i) = C(size - i, positives - 1) / C(size, positives)
    num_places = size - positives + 1
    owner, place = owners(num_places), 1 + places(num_places)
    chance = np.exp(
        _log_choose(size[owner] - place, positives[owner] - 1) - _log_choose(size, positives)[owner]
    )
    reciprocal_T = np.zeros(ties.num_tasks)
    reciprocal_T[counts_T] = sum_T(chance / (above[owner] + place), owner, best.size)
    return mean_over_tasks(reciprocal_T, counts_T)


def candidate_terms(
    family: str, k: int | None, places_N2: Ints, code_N: Ints, num_tasks: int
) -> Terms:
    """Return a metric of positive rows, each among sampled candidates, mean over these rows."""
    # Numbers of candidates above a row and tied with it; -1: no positive row. The row's rank is
    # each of above + 1 to above + tied + 1 with equal chance.
    above_P, tied_P = places_N2[places_N2[:, 0] >= 0].astype(np.int64).T
    if not above_P.size:
        return undefined_terms(num_tasks, "no positive row among candidates")
    most = int((above_P + tied_P).max()) + 1
    rank_R = np.arange(1, most + 1)
    counts_R = np.ones(most) if k is None else (rank_R <= k).astype(np.float64)
    worth_R = {
        "mrr": 1.0 / rank_R,
        "ndcg": counts_R / np.log2(1.0 + rank_R),  # the ideal order has the row first: 1
        "hr": counts_R,
        "recall": counts_R,
        "p": counts_R / (k or 1),
    }[family]
    # The mean over the ranks that a tie allows is a difference of running sums.
    before = np.concatenate(([0.0], np.cumsum(worth_R)))
    value_P = (before[above_P + tied_P + 1] - before[above_P]) / (tied_P + 1)
    return mean_over_rows(value_P, code_N[places_N2[:, 0] >= 0], num_tasks)


def _positives_found_T(ties: Ties, k: int) -> Floats:
    inside_R = np.clip(k - ties.above_R, 0, ties.size_R)
    return sum_T(ties.positives_R * inside_R / ties.size_R, ties.task_R, ties.num_tasks)


def _log_choose(n: Ints, k: Ints) -> Floats:
    """Return the logarithms of binomial coefficients, for 0 <= k <= n."""
    most = int(n.max(initial=0))
    factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, most + 1)))))
    found: Floats = factorials[n] - factorials[np.minimum(k, n)] - factorials[np.maximum(n - k, 0)]
    return found


def _dcg_T(ranked: RankedRows, k: int) -> Floats:
    discount_before = np.concatenate(([0.0], np.cumsum(1.0 / np.log2(np.arange(2, k + 2)))))
    best_N = ranked.task_end_N - ranked.tie_end_N
    worst_N = ranked.task_end_N - ranked.tie_first_N
    total_N = discount_before[np.minimum(worst_N, k)] - discount_before[np.minimum(best_N, k)]
    # Tied rows stand at each of their ranks with equal chance: each gets the mean discount.
    return sum_T(ranked.label_N * total_N / (worst_N - best_N), ranked.task_N, ranked.num_tasks)
