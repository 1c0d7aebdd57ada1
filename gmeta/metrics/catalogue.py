"""The metrics by name, and which of them mean something for a loss."""

import difflib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from gmeta.config.evaluation import LIKED, EvaluationConfig
from gmeta.config.losses import Loss
from gmeta.errors import ConfigError
from gmeta.metrics.custom_metrics import NAMED_METRICS, is_custom
from gmeta.metrics.metric_info import CANDIDATE_TEXTS, OVER_CANDIDATES, TEXTS, MetricInfo

PredictionKind: TypeAlias = Literal["probability", "rating", "score"]  # a score ranks, no more

OF_CLICKS = ("auc", "gauc", "logloss")
OF_RATINGS = ("mae", "rmse", "ndcg@1", "ndcg@3", "auc", "gauc")
OF_SCORES = ("ndcg@10", "auc", "gauc")
LIST_LOSSES = ("softmax", "pairwise")
WHOLE_NAMES = ("auc", "gauc", "pr_auc", "logloss", "ece", "mae", "rmse", "mrr", *LIST_LOSSES)
CUT_NAMES = ("ndcg", "hr", "p", "recall")  # of the K best rows of a task
# More than any list that people look at; discounts are tabled up to it.
MOST_K = 10_000
OF_PROBABILITIES = ("logloss", "ece")
OF_VALUES = ("mae", "rmse")


def predicted_by(loss: str) -> PredictionKind:
    """Return what a model of this loss predicts."""
    # A score tells the order of a task's rows, and nothing of their level.
    if loss in LIST_LOSSES:
        return "score"
    return "probability" if loss == "bce" else "rating"


def predicts_alike(loss: str, other: str) -> bool:
    """Return whether models of two losses predict the same kind of value."""
    return predicted_by(loss) == predicted_by(other)


def loss_metric(loss: str) -> str:
    """Return the metric of the distance between labels and predictions of this loss."""
    return {"probability": "logloss", "rating": "mae", "score": loss}[predicted_by(loss)]


def label_of(metric: str) -> tuple[str, str]:
    """Return a metric's own name and the label behind it, as in `auc:conversion` or
    `package.module:Name:conversion`; "" for the judged label."""
    name, _, label = metric.partition(":")
    if not (name and label):
        return name, label
    is_ours = bool(parse_name(name)[0]) or name in NAMED_METRICS.names() or _is_mistyped(name)
    if not is_ours:
        # An import path has a colon of its own.
        attribute, _, label = label.partition(":")
        return f"{name}:{attribute}", label
    return name, label


def _known_names() -> list[str]:
    return [*WHOLE_NAMES, *(f"{one}@K" for one in CUT_NAMES), *NAMED_METRICS.names()]


def _is_mistyped(name: str) -> bool:
    # A metric of ours that is misspelt, as in `aucc:click`, must not be imported as a module.
    if "." in name or not difflib.get_close_matches(name, _known_names(), n=1):
        return False
    try:
        return importlib.util.find_spec(name) is None
    except ValueError:  # a module that was made without a file
        return False


@dataclass(frozen=True)
class Scoring:
    """The metrics of predictions of a loss. Raises ConfigError: a metric is unknown, named twice,
    or means nothing for the loss."""

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

    def for_other_label(self, loss: Loss) -> "Scoring":
        """Return the scoring of another label of the same rows, by its loss."""
        # Candidates are sampled beside one label's positive rows: no other is ranked among them.
        alike = predicts_alike(loss, self.loss)
        kept = [name for name in self.config.metrics if alike and not self.is_over_candidates(name)]
        return Scoring(loss, replace(self.config, metrics=tuple(kept), candidates=0))

    def is_over_candidates(self, name: str) -> bool:
        """Return whether a metric ranks each positive row among sampled items."""
        return bool(self.config.candidates) and parse_name(name)[0] in _OF_CANDIDATES

    @property
    def names(self) -> tuple[str, ...]:
        """Return the metrics in the order of a report, the headline first."""
        usual = {"probability": OF_CLICKS, "rating": OF_RATINGS, "score": OF_SCORES}
        return self.config.metrics or usual[predicted_by(self.loss)]

    @property
    def measure(self) -> str:
        """Return the metric that chooses rates: the headline if it is a distance, else the loss."""
        # Not AUC, which does not notice outputs that run away, as where a rate is too high.
        headline = self.names[0]
        return headline if headline in ("logloss", *OF_VALUES) else loss_metric(self.loss)

    @property
    def fitted_loss(self) -> Loss:
        """Return what baselines are fitted to: the headline of ratings, else the loss."""
        if predicted_by(self.loss) != "rating":
            return self.loss
        fitted: dict[str, Loss] = {"mae": "mae", "rmse": "mse"}
        return fitted.get(self.names[0], self.loss)

    @property
    def threshold(self) -> float:
        """Return the least label that counts as positive."""
        if self.loss == "bce":
            return 0.5
        usual = LIKED if predicted_by(self.loss) == "rating" else 0.5
        return self.config.positive_rating or usual

    def check(self, key: str, name: str) -> None:
        """Raise ConfigError unless `name`, the value of `key`, is a metric of this loss."""
        family, at = parse_name(name)
        # A custom metric may mean something for any loss: its package decides.
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
        kind = predicted_by(self.loss)
        if family in OF_PROBABILITIES and kind == "rating":
            raise ConfigError(
                f"{key} = {name!r} is of probabilities, but with outer.loss = {self.loss!r} the "
                "model predicts ratings. Choose mae or rmse"
            )
        if family in OF_PROBABILITIES + OF_VALUES and kind == "score":
            raise ConfigError(
                f"{key} = {name!r} is of probabilities or ratings, but with outer.loss = "
                f"{self.loss!r} the model predicts scores, which tell the order of a task's rows "
                f"alone. Choose ndcg@10, gauc or {self.loss}"
            )
        if family in LIST_LOSSES and kind != "score":
            raise ConfigError(
                f"{key} = {name!r} is of scores, but with outer.loss = {self.loss!r} the model "
                f"predicts a {kind}. Choose {loss_metric(self.loss)}, or train with "
                f"outer.loss = {name!r}"
            )

    def threshold_of(self, name: str) -> float | None:
        """Return the least label that a metric counts as positive; None if it counts none."""
        return self.threshold if parse_name(name)[0] in _OF_POSITIVES else None

    def info(self, name: str) -> MetricInfo:
        """Return a metric's label, direction, unit and explanation."""
        family, k = parse_name(name)
        if not family:
            own = NAMED_METRICS.find(name)
            return MetricInfo(own.label, own.higher_is_better, own.unit, own.explanation)
        label, higher_is_better, explanation = TEXTS[family]
        is_rating = predicted_by(self.loss) == "rating"
        if (is_rating or self.threshold != 0.5) and family in _OF_POSITIVES:
            at_least = f"\N{GREATER-THAN OR EQUAL TO} {self.threshold:g}"
            label += f" (rating {at_least})" if family in ("auc", "gauc") else f" ({at_least})"
        unit = "nats" if family == "logloss" else ""
        if family in OF_VALUES and is_rating:
            unit = self.config.unit
        gain = "rating" if is_rating else "label"
        if self.is_over_candidates(name):
            if self.config.ranks_all:
                label, number = f"{label} of all items", "all items that its events do not hold"
            else:
                label += f" of {self.config.candidates + 1}"
                number = f"{self.config.candidates} sampled items that its task has no row of"
            explanation = CANDIDATE_TEXTS[family] + OVER_CANDIDATES.format(n=number)
        cut = {"k": str(k or ""), "gain": gain}
        return MetricInfo(label.format(**cut), higher_is_better, unit, explanation.format(**cut))


# Metrics that ask which rows are positive.
_OF_POSITIVES = ("auc", "gauc", "pr_auc", "mrr", "hr", "p", "recall")
_OF_CANDIDATES = ("mrr", "ndcg", "hr", "p", "recall")


def is_metric(name: str) -> bool:
    """Return whether a metric has that name; no name with a label behind it is one."""
    return bool(parse_name(name)[0]) or (not label_of(name)[1] and is_custom(name))


def custom_names(names: Iterable[str]) -> list[str]:
    """Return the names that no metric of this release has, without empty ones."""
    return [name for name in names if name and not parse_name(name)[0]]


def metric_infos(scoring: Scoring) -> dict[str, MetricInfo]:
    """Return the metrics that are reported, the headline metric first."""
    return {name: scoring.info(name) for name in scoring.names}


def parse_name(name: str) -> tuple[str, int | None]:
    """Return the family of a metric's name and its K, if any; no family for a custom metric."""
    if name in WHOLE_NAMES:
        return name, None
    match = re.fullmatch(rf"({'|'.join(CUT_NAMES)})@([0-9]{{1,6}})", name)
    return (match[1], int(match[2])) if match else ("", None)
