"""Measures predictions by the metrics of the catalogue; exact, in O(n log n)."""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from gmeta.metrics.catalogue import LIST_LOSSES, Scoring, parse_name
from gmeta.metrics.custom_metrics import custom_terms
from gmeta.metrics.list_losses import list_loss_terms
from gmeta.metrics.row_metrics import auc_terms, ece_terms, logloss_N, pr_auc_terms
from gmeta.metrics.task_metrics import (
    RankedRows,
    Ties,
    candidate_terms,
    find_ties,
    gauc_terms,
    hit_terms,
    mrr_terms,
    ndcg_terms,
    precision_terms,
    rank_within_tasks,
    recall_terms,
)
from gmeta.metrics.terms import (
    Array,
    Floats,
    Ints,
    Terms,
    Value,
    mean_of,
    mean_over_rows,
    undefined_terms,
    why_unusable,
)

# N rows, T tasks


def evaluate_split(
    label: Array,
    prediction: Array,
    task: Array,
    scoring: Scoring,
    names: Sequence[str] = (),
    places_N2: Array | None = None,
) -> dict[str, Value]:
    """Return the metrics of one split: those of the scoring, or `names`. The rows of label,
    prediction (probabilities for bce, else ratings) and task (any integers) are aligned;
    `places_N2`: see split_terms. Raises ValueError: their shapes differ.

    >>> labels, tasks = np.array([0, 1, 0, 1, 1]), np.array([7, 7, 8, 8, 8])
    >>> scores = np.array([0.1, 0.9, 0.8, 0.3, 0.4])
    >>> evaluate_split(labels, scores, tasks, Scoring("bce"), ["gauc"])["gauc"].value
    0.4"""
    terms = split_terms(label, prediction, task, scoring, names, places_N2, resampled=False)
    return {name: Value(one.value, one.num_tasks, one.reason) for name, one in terms.items()}


def split_terms(
    label: Array,
    prediction: Array,
    task: Array,
    scoring: Scoring,
    names: Sequence[str] = (),
    places_N2: Array | None = None,
    resampled: bool = True,
    tasks: Array | None = None,
) -> dict[str, Terms]:
    """Return the metrics of a split as sums over its tasks, or over `tasks`: rising ids, of which
    some may have no row.

    `places_N2` has for each positive row the numbers of sampled candidates above it and tied with
    it, -1 for other rows. Without `resampled` custom metrics have a value alone, in 1/50 of the
    time."""
    label_N, score_N, task_N = _check_arrays(label, prediction, task)
    # Dense codes: terms are arrays with a place for each task.
    ids_T = np.unique(task_N) if tasks is None else tasks
    code_N = np.searchsorted(ids_T, task_N)
    chosen = tuple(names) or scoring.names
    reason = why_unusable(score_N)
    if reason:
        return dict.fromkeys(chosen, undefined_terms(ids_T.size, reason))
    maker = _terms_by_name(label_N, score_N, code_N, ids_T.size, scoring.threshold)

    def over_candidates(name: str) -> Terms:
        if places_N2 is None:
            return undefined_terms(ids_T.size, "no candidates were sampled")
        return candidate_terms(*parse_name(name), places_N2, code_N, ids_T.size)

    def terms_of(name: str) -> Terms:
        if not parse_name(name)[0]:
            return custom_terms(name, label_N, score_N, code_N, ids_T.size, resampled)
        return over_candidates(name) if scoring.is_over_candidates(name) else maker(name)

    return {name: terms_of(name) for name in chosen}


def logloss(label: Array, probability: Array) -> float:
    """Return the mean negative log-likelihood in nats, clipped at the epsilon of float32."""
    label_N, probability_N, _ = _check_arrays(
        label, probability, np.zeros(np.shape(label), np.int64)
    )
    return mean_of(logloss_N(label_N, probability_N))


def mae(label: Array, prediction: Array) -> float:
    """Return the mean absolute error over all rows, in the label's unit."""
    label_N, prediction_N, _ = _check_arrays(label, prediction, np.zeros(np.shape(label), np.int64))
    return mean_of(np.abs(prediction_N - label_N))


def _check_arrays(label: Array, score: Array, task: Array) -> tuple[Floats, Floats, Ints]:
    shapes = (np.shape(label), np.shape(score), np.shape(task))
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"label, prediction and task have the shapes {shapes}: they must be one-dimensional "
            "and equally long, one entry per row. Pass the columns of one table."
        )
    # In float64: sums over many rows keep their digits.
    return np.asarray(label, np.float64), np.asarray(score, np.float64), np.asarray(task, np.int64)


def _terms_by_name(
    label_N: Floats, score_N: Floats, code_N: Ints, num_tasks: int, threshold: float
) -> Callable[[str], Terms]:
    error_N = score_N - label_N

    @functools.cache  # the sort is most of the work, and most metrics share it
    def rank_rows() -> RankedRows:
        return rank_within_tasks(label_N, score_N, code_N, num_tasks)

    @functools.cache
    def rank_ideally() -> RankedRows:
        return rank_within_tasks(label_N, label_N, code_N, num_tasks)

    @functools.cache
    def find_all_ties() -> Ties:
        return find_ties(rank_rows(), threshold)

    def make_terms(name: str) -> Terms:
        family, k = parse_name(name)
        # Functions: only the named metric is computed.
        makers: dict[str, Callable[[], Terms]] = {
            "auc": lambda: auc_terms(label_N >= threshold, score_N, code_N, num_tasks),
            "pr_auc": lambda: pr_auc_terms(label_N >= threshold, score_N, code_N, num_tasks),
            "gauc": lambda: gauc_terms(rank_rows(), threshold),
            "logloss": lambda: mean_over_rows(logloss_N(label_N, score_N), code_N, num_tasks),
            "ece": lambda: ece_terms(label_N, score_N, code_N, num_tasks),
            "mae": lambda: mean_over_rows(np.abs(error_N), code_N, num_tasks),
            "rmse": lambda: mean_over_rows(np.square(error_N), code_N, num_tasks, is_root=True),
            **{
                loss: functools.partial(list_loss_terms, loss, label_N, score_N, code_N, num_tasks)
                for loss in LIST_LOSSES
            },
            "mrr": lambda: mrr_terms(find_all_ties()),
            "ndcg": lambda: ndcg_terms(rank_rows(), rank_ideally(), k or 0),
            "hr": lambda: hit_terms(find_all_ties(), k or 0),
            "p": lambda: precision_terms(find_all_ties(), k or 0),
            "recall": lambda: recall_terms(find_all_ties(), k or 0),
        }
        return makers[family]()

    return make_terms
