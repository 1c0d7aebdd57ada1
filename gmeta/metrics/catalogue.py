"""Which metrics there are by name, and the functions that measure them; exact, in O(n log n)."""

import difflib
import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from gmeta.errors import ConfigError
from gmeta.metrics.config import LIKED, EvaluationConfig
from gmeta.metrics.list_losses import list_loss_terms
from gmeta.metrics.own import NAMED_METRICS, is_own, own_terms
from gmeta.metrics.pooled import (
    ECE_BINS,
    LOGLOSS_CLIP,
    auc_terms,
    ece_terms,
    logloss_N,
    pr_auc_terms,
)
from gmeta.metrics.ranking import (
    Gain,
    RankedRows,
    Ties,
    candidate_terms,
    gauc_terms,
    hit_terms,
    mrr_terms,
    ndcg_terms,
    precision_terms,
    rank_within_tasks,
    recall_terms,
    ties_of,
)
from gmeta.metrics.terms import (
    Array,
    Floats,
    Ints,
    Terms,
    Value,
    mean_of,
    mean_over_rows,
    undefined,
    unusable,
)

# N rows, T tasks

Loss: TypeAlias = Literal["bce", "mse", "huber", "mae", "softmax", "pairwise"]
Predicted: TypeAlias = Literal["probability", "rating", "score"]  # a score ranks, no more

OF_CLICKS = ("auc", "gauc", "logloss")
OF_RATINGS = ("mae", "rmse", "ndcg@1", "ndcg@3", "auc", "gauc")
OF_SCORES = ("ndcg@10", "auc", "gauc")
LIST_LOSSES = ("softmax", "pairwise")
WHOLE_NAMES = ("auc", "gauc", "pr_auc", "logloss", "ece", "mae", "rmse", "mrr", *LIST_LOSSES)
CUT_NAMES = ("ndcg", "hr", "p", "recall")  # of the K best rows of a task
# More than any list that somebody looks at; discounts are tabled up to it.
MOST_K = 10_000
OF_PROBABILITIES = ("logloss", "ece")
OF_VALUES = ("mae", "rmse")


def predicted_by(loss: str) -> Predicted:
    """Return what a model of this loss predicts: a probability, a label, or a score that tells the
    order of a task's rows and nothing of their level.
    """
    if loss in LIST_LOSSES:
        return "score"
    return "probability" if loss == "bce" else "rating"


def predicts_alike(loss: str, other: str) -> bool:
    """Return whether models of two losses predict the same."""
    return predicted_by(loss) == predicted_by(other)


def loss_metric(loss: str) -> str:
    """Return the metric that says how far predictions of this loss are from the labels."""
    return {"probability": "logloss", "rating": "mae", "score": loss}[predicted_by(loss)]


def label_of(metric: str) -> tuple[str, str]:
    """Return a metric's own name and the label that it is of, which may stand behind it:
    `auc:conversion`, `package.module:Name:conversion`; "" for the one that headline metrics are of.
    """
    name, _, label = metric.partition(":")
    is_ours = bool(_parsed(name)[0]) or name in NAMED_METRICS.names() or _is_mistyped(name)
    if name and label and not is_ours:
        # An import path has a colon of its own.
        attribute, _, label = label.partition(":")
        return f"{name}:{attribute}", label
    return name, label


def _known_names() -> list[str]:
    return [*WHOLE_NAMES, *(f"{one}@K" for one in CUT_NAMES), *NAMED_METRICS.names()]


def _is_mistyped(name: str) -> bool:
    """Return whether a name in front of a colon is meant for a metric, and not for a module."""
    if "." in name or not difflib.get_close_matches(name, _known_names(), n=1):
        return False
    try:
        return importlib.util.find_spec(name) is None
    except ValueError:  # a module that was made without a file
        return False


@dataclass(frozen=True)
class MetricInfo:
    """How a metric is named, read and compared."""

    label: str
    higher_is_better: bool
    unit: str
    explanation: str


@dataclass(frozen=True)
class Scoring:
    """What of predictions is measured: those of a loss, by the metrics of a config.

    Raises:
        ConfigError: a metric is unknown, named twice, or means nothing for the loss.
    """

    loss: Loss
    config: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for index, name in enumerate(self.config.metrics):
            self.check(f"evaluation.metrics[{index}]", name)
            if name in self.config.metrics[:index]:
                raise ConfigError(
                    f"evaluation.metrics names {name!r} twice: once is enough. Remove one"
                )

        self._check_candidates()

    def _check_candidates(self) -> None:
        if self.config.candidates and not any(map(self.is_over_candidates, self.names)):
            raise ConfigError(
                f"evaluation.candidates = {self.config.candidates}, but evaluation.metrics ranks "
                f"nothing: {', '.join(self.names)}. Name metrics such as hr@10, ndcg@10 and mrr, "
                "or leave it 0"
            )

    def beside(self, loss: Loss) -> "Scoring":
        """Return what is measured of another label of the same rows, by its loss: the same metrics
        where they mean something for it, none of them over candidates, which are sampled beside the
        positive rows of one label.
        """
        alike = predicts_alike(loss, self.loss)
        kept = [name for name in self.config.metrics if alike and not self.is_over_candidates(name)]
        return Scoring(loss, replace(self.config, metrics=tuple(kept), candidates=0))

    def is_over_candidates(self, name: str) -> bool:
        """Return whether a metric ranks each positive row among sampled items."""
        return bool(self.config.candidates) and _parsed(name)[0] in _OF_CANDIDATES

    @property
    def names(self) -> tuple[str, ...]:
        """Return the metrics in the order of a report, the headline first."""
        usual = {"probability": OF_CLICKS, "rating": OF_RATINGS, "score": OF_SCORES}
        return self.config.metrics or usual[predicted_by(self.loss)]

    @property
    def threshold(self) -> float:
        """Return the least label that counts as positive."""
        if self.loss == "bce":
            return 0.5
        usual = LIKED if predicted_by(self.loss) == "rating" else 0.5
        return self.config.positive_rating or usual

    def check(self, key: str, name: str) -> None:
        """Check that `name`, the value of `key`, is a metric of this loss.

        Raises:
            ConfigError: it is none.
        """
        family, at = _parsed(name)
        if not family and is_metric(name):
            try:
                NAMED_METRICS.find(name)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            return
        if not family or (at is not None and not 1 <= at <= MOST_K):
            known = _known_names()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? Else " if near else ""
            raise ConfigError(
                f"{key} = {name!r} is no metric: {hint}choose one of {', '.join(known)}, "
                f"with a whole number from 1 to {MOST_K:,} for K, or name yours as "
                "package.module:Name (docs/extending.md)"
            )
        predicted = predicted_by(self.loss)
        if family in OF_PROBABILITIES and predicted == "rating":
            raise ConfigError(
                f"{key} = {name!r} is of probabilities, but with outer.loss = {self.loss!r} the "
                "model predicts ratings. Choose mae or rmse"
            )
        if family in OF_PROBABILITIES + OF_VALUES and predicted == "score":
            raise ConfigError(
                f"{key} = {name!r} is of probabilities or ratings, but with outer.loss = "
                f"{self.loss!r} the model predicts scores, which tell the order of a task's rows "
                f"alone. Choose ndcg@10, gauc or {self.loss}"
            )
        if family in LIST_LOSSES and predicted != "score":
            raise ConfigError(
                f"{key} = {name!r} is of scores, but with outer.loss = {self.loss!r} the model "
                f"predicts a {predicted}. Choose {loss_metric(self.loss)}, or train with "
                f"outer.loss = {name!r}"
            )

    def threshold_of(self, name: str) -> float | None:
        """Return the least label that a metric counts as positive; None if it does not ask."""
        return self.threshold if _parsed(name)[0] in _OF_POSITIVES else None

    def info(self, name: str) -> MetricInfo:
        """Return how a metric is named and read."""
        family, k = _parsed(name)
        if not family:
            own = NAMED_METRICS.find(name)
            return MetricInfo(own.label, own.higher_is_better, own.unit, own.explanation)
        label, higher_is_better, explanation = _TEXTS[family]
        is_rating = predicted_by(self.loss) == "rating"
        if (is_rating or self.threshold != 0.5) and family in _OF_POSITIVES:
            at_least = f"\N{GREATER-THAN OR EQUAL TO} {self.threshold:g}"
            label += f" (rating {at_least})" if family in ("auc", "gauc") else f" ({at_least})"
        unit = "nats" if family == "logloss" else ""
        if family in OF_VALUES and is_rating:
            unit = self.config.unit
        gain = "rating" if is_rating else "label"
        if self.is_over_candidates(name):
            label += f" of {self.config.candidates + 1}"
            explanation = _CANDIDATE_TEXTS[family] + _OVER_CANDIDATES.format(
                n=self.config.candidates
            )
        cut = {"k": str(k or ""), "gain": gain}
        return MetricInfo(label.format(**cut), higher_is_better, unit, explanation.format(**cut))


# Metrics that ask which rows are positive.
_OF_POSITIVES = ("auc", "gauc", "pr_auc", "mrr", "hr", "p", "recall")
_OF_CANDIDATES = ("mrr", "ndcg", "hr", "p", "recall")
_CANDIDATE_TEXTS = {
    "mrr": "1 / the rank of a positive row",
    "ndcg": "1 / log2(1 + the rank of a positive row), 0 beyond rank {k}",
    "hr": "Whether a positive row is among the {k} best",
    "p": "1 / {k} where a positive row is among the {k} best",
    "recall": "Whether a positive row is among the {k} best",
}
_OVER_CANDIDATES = (
    " of itself and {n} sampled items that its task has no row of; mean over the positive rows; "
    "equal scores share their ranks."
)
_OVER_TASKS = "mean over the tasks that hold one; equal scores share their ranks"
# Of each family of metrics: its label, whether higher is better, and what it is.
_TEXTS: dict[str, tuple[str, bool, str]] = {
    "auc": (
        "AUC",
        True,
        "Chance that a positive row scores above a negative one; 0.5 is guessing.",
    ),
    "gauc": (
        "GAUC",
        True,
        "AUC inside each task, averaged with the task's rows as weights, over the tasks that "
        "hold both classes (Zhou et al., Deep Interest Network, 2018).",
    ),
    "pr_auc": (
        "PR-AUC",
        True,
        "Average precision: the precision at each positive row, averaged over them; guessing "
        "earns the share of positive rows.",
    ),
    "logloss": (
        "Logloss",
        False,
        f"Mean negative log-likelihood, probabilities clipped at {LOGLOSS_CLIP:.1e}.",
    ),
    "ece": (
        "ECE",
        False,
        f"Expected calibration error: distance of predicted probability and share of positives, "
        f"over {ECE_BINS} bins of equal width, weighted by their rows (Guo et al. 2017).",
    ),
    "mae": ("MAE", False, "Mean absolute error over all rows."),
    "rmse": ("RMSE", False, "Root of the mean squared error over all rows."),
    "softmax": (
        "Softmax loss",
        False,
        "Cross-entropy of the softmax of a task's scores against its labels over their sum; mean "
        "over the tasks whose labels differ.",
    ),
    "pairwise": (
        "Pairwise loss",
        False,
        "Mean of log(1 + exp(lower - higher)) over a task's pairs of rows with different labels, "
        "of their scores; mean over the tasks that have such.",
    ),
    "mrr": ("MRR", True, f"1 / the rank of a task's best positive row; {_OVER_TASKS}."),
    "ndcg": (
        "nDCG@{k}",
        True,
        "DCG with gain = {gain}, discount log2(1 + rank), over the ideal order's; mean over tasks.",
    ),
    "hr": (
        "HR@{k}",
        True,
        f"Hit rate: whether a task's {{k}} best rows hold a positive one; {_OVER_TASKS}.",
    ),
    "p": ("P@{k}", True, f"Positive rows among a task's {{k}} best, over {{k}}; {_OVER_TASKS}."),
    "recall": (
        "Recall@{k}",
        True,
        f"Share of a task's positive rows among its {{k}} best; {_OVER_TASKS}.",
    ),
}


def is_metric(name: str) -> bool:
    """Return whether a metric of this release, or of a package of somebody's own, has that name;
    no name with a label behind it is one."""
    return bool(_parsed(name)[0]) or (not label_of(name)[1] and is_own(name))


def not_ours(names: Iterable[str]) -> list[str]:
    """Return the names that no metric of this release has; an empty one stands for none at all."""
    return [name for name in names if name and not _parsed(name)[0]]


def metric_infos(scoring: Scoring) -> dict[str, MetricInfo]:
    """Return the metrics that are reported, the headline metric first."""
    return {name: scoring.info(name) for name in scoring.names}


def evaluate_split(
    label: Array, prediction: Array, task: Array, scoring: Scoring, names: Sequence[str] = ()
) -> dict[str, Value]:
    """Return the metrics of one split: those of the scoring, or `names`.

    label_N, prediction_N (probabilities for bce, ratings for other losses) and task_N (any
    integers) are aligned rows. Raises ValueError where their shapes differ.
    """
    terms = split_terms(label, prediction, task, scoring, names, resampled=False)
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
    """Return the metrics of a split as sums over its tasks, by rising id, or over `tasks`, rising
    ones of which some may have no row; `names` picks some.

    `places_N2` has of each positive row how many sampled candidates score above it and how many the
    same, -1 of other rows: what metrics over candidates are made of. Without `resampled` metrics of
    somebody's own have their value alone, for a fiftieth of the time: see own_terms.
    """
    label_N, score_N, task_N = _checked(label, prediction, task)
    ids_T = np.unique(task_N) if tasks is None else tasks
    code_N = np.searchsorted(ids_T, task_N)
    chosen = tuple(names) or scoring.names
    reason = unusable(score_N)
    if reason:
        return dict.fromkeys(chosen, undefined(ids_T.size, reason))
    maker = _maker(label_N, score_N, code_N, ids_T.size, scoring.threshold)

    def over_candidates(name: str) -> Terms:
        if places_N2 is None:
            return undefined(ids_T.size, "no candidates were sampled")
        return candidate_terms(*_parsed(name), places_N2, code_N, ids_T.size)

    def terms_of(name: str) -> Terms:
        if not _parsed(name)[0]:
            return own_terms(name, label_N, score_N, code_N, ids_T.size, resampled)
        return over_candidates(name) if scoring.is_over_candidates(name) else maker(name)

    return {name: terms_of(name) for name in chosen}


def auc(label: Array, score: Array) -> float:
    """Return the area under the ROC curve: P(a positive scores above a negative), ties half.

    A positive has a label of at least 0.5. NaN when a class is missing or a score is not finite.

    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
    0.875
    """
    label_N, score_N, _ = _checked(label, score, np.zeros(np.shape(label), np.int64))
    return auc_terms(label_N >= 0.5, score_N, np.zeros(label_N.size, np.int64), 1).value


def gauc(label: Array, score: Array, task: Array) -> float:
    """Return the AUC inside each task, weighted by its rows; see gauc_terms.

    >>> score = np.array([0.1, 0.9, 0.8, 0.3, 0.4])
    >>> gauc(np.array([0, 1, 0, 1, 1]), score, np.array([7, 7, 8, 8, 8]))
    0.4
    """
    label_N, score_N, task_N = _checked(label, score, task)
    ids_T, code_N = np.unique(task_N, return_inverse=True)
    return gauc_terms(rank_within_tasks(label_N, score_N, code_N, ids_T.size), 0.5).value


def ndcg_at_k(label: Array, score: Array, task: Array, k: int, gain: Gain = "linear") -> float:
    """Return the normalised discounted cumulative gain of a task's k best rows, mean over tasks;
    see ndcg_terms.

    >>> ndcg_at_k(np.array([5.0, 4.0]), np.array([0.2, 0.7]), np.array([1, 1]), k=1)
    0.8
    """
    label_N, score_N, task_N = _checked(label, score, task)
    if k < 1:
        raise ValueError(f"nDCG@{k} does not exist: k must be at least 1. Pass k >= 1.")
    ids_T, code_N = np.unique(task_N, return_inverse=True)
    ranked = rank_within_tasks(label_N, score_N, code_N, ids_T.size)
    ideal = rank_within_tasks(label_N, label_N, code_N, ids_T.size)
    return ndcg_terms(ranked, ideal, k, gain).value


def logloss(label: Array, probability: Array) -> float:
    """Return the mean negative log-likelihood in nats, clipped at the epsilon of float32."""
    label_N, probability_N, _ = _checked(label, probability, np.zeros(np.shape(label), np.int64))
    return mean_of(logloss_N(label_N, probability_N))


def mae(label: Array, prediction: Array) -> float:
    """Return the mean absolute error over all rows, in the label's unit."""
    label_N, prediction_N, _ = _checked(label, prediction, np.zeros(np.shape(label), np.int64))
    return mean_of(np.abs(prediction_N - label_N))


def rmse(label: Array, prediction: Array) -> float:
    """Return the root of the mean squared error over all rows, in the label's unit."""
    label_N, prediction_N, _ = _checked(label, prediction, np.zeros(np.shape(label), np.int64))
    return float(np.sqrt(mean_of(np.square(prediction_N - label_N))))


def _parsed(name: str) -> tuple[str, int | None]:
    """Return a metric's family and its K, None for a whole one; no family for a name of none."""
    if name in WHOLE_NAMES:
        return name, None
    found = re.fullmatch(rf"({'|'.join(CUT_NAMES)})@([0-9]{{1,6}})", name)
    return (found[1], int(found[2])) if found else ("", None)


def _checked(label: Array, score: Array, task: Array) -> tuple[Floats, Floats, Ints]:
    shapes = (np.shape(label), np.shape(score), np.shape(task))
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"label, prediction and task have the shapes {shapes}: they must be one-dimensional "
            "and equally long, one entry per row. Pass the columns of one table."
        )
    return np.asarray(label, np.float64), np.asarray(score, np.float64), np.asarray(task, np.int64)


def _maker(
    label_N: Floats, score_N: Floats, code_N: Ints, num_tasks: int, threshold: float
) -> Callable[[str], Terms]:
    """Return what makes the terms of a metric by its name."""
    error_N = score_N - label_N

    @functools.cache  # the sort is most of the work, and most metrics share it
    def ranked() -> RankedRows:
        return rank_within_tasks(label_N, score_N, code_N, num_tasks)

    @functools.cache
    def ideal() -> RankedRows:
        return rank_within_tasks(label_N, label_N, code_N, num_tasks)

    @functools.cache
    def ties() -> Ties:
        return ties_of(ranked(), threshold)

    def made(name: str) -> Terms:
        family, k = _parsed(name)
        makers: dict[str, Callable[[], Terms]] = {
            "auc": lambda: auc_terms(label_N >= threshold, score_N, code_N, num_tasks),
            "pr_auc": lambda: pr_auc_terms(label_N >= threshold, score_N, code_N, num_tasks),
            "gauc": lambda: gauc_terms(ranked(), threshold),
            "logloss": lambda: mean_over_rows(logloss_N(label_N, score_N), code_N, num_tasks),
            "ece": lambda: ece_terms(label_N, score_N, code_N, num_tasks),
            "mae": lambda: mean_over_rows(np.abs(error_N), code_N, num_tasks),
            "rmse": lambda: mean_over_rows(np.square(error_N), code_N, num_tasks, is_root=True),
            **{
                loss: functools.partial(list_loss_terms, loss, label_N, score_N, code_N, num_tasks)
                for loss in LIST_LOSSES
            },
            "mrr": lambda: mrr_terms(ties()),
            "ndcg": lambda: ndcg_terms(ranked(), ideal(), k or 0, "linear"),
            "hr": lambda: hit_terms(ties(), k or 0),
            "p": lambda: precision_terms(ties(), k or 0),
            "recall": lambda: recall_terms(ties(), k or 0),
        }
        return makers[family]()

    return made
