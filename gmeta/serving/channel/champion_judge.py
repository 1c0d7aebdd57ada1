"""Whether a candidate may take the champion's place: scored on the same rows of tasks that neither
was trained on, the difference paired task by task.

A candidate is promoted where its predictions are finite, their mean (for clicks only) is the
labels' within 10 %, or nearer to it than the champion's, and its loss is at most a margin worse at
95 %: a test of non-inferiority (Walker & Nowacki 2011, Understanding Equivalence and Noninferiority
Testing). Both means weigh rows as training does.

Shape suffixes: T tasks, N rows"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.evaluation.report.intervals import Interval, bootstrap, percentile_interval
from gmeta.metrics.catalogue import Scoring, loss_metric, predicted_by
from gmeta.metrics.row_metrics import logloss_N
from gmeta.metrics.scores import split_terms
from gmeta.metrics.terms import Terms, sum_T
from gmeta.serving.channel.gate_predictions import (
    GatePredictions,
    knows_inputs,
    predict_gate,
    to_optional_values,
)
from gmeta.serving.model_loader import load
from metaio.format.dataset import Dataset
from metaio.quantities import format_count
from metaio.stream.chain import count_waiting, find_earlier_increment

CALIBRATION = (0.9, 1.1)
MARGIN_SHARE = 0.01  # of the champion's loss
# Half an interval over the margin at which 5 % of equal models are refused:
# P(N(0, 1) < 1.96 - 1.96 / 0.54) = 0.05. Earlier windows are added until it is reached.
NARROW = 0.54
# The least calibration: the distance from 1 is a logarithm, which 0 does not have.
TINY = 1e-12


@dataclass(frozen=True)
class Measure:
    """A number with its 95 % interval over tasks; None where there is none."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """What was decided, and by what."""

    promote: bool
    reasons: Sequence[str]
    metric: str
    num_tasks: int
    num_rows: int  # whose label is known
    windows: int
    margin: float | None
    # The champion's loss minus the candidate's: positive where the candidate is better.
    difference: Measure | None
    calibration: Measure | None
    candidate: dict[str, float | None]
    champion: dict[str, float | None] = field(default_factory=dict)
    champion_version: int | None = None
    model: str = ""  # the checksum of the candidate
    dataset: str = ""  # the fingerprint of what it was judged on
    num_waiting: int = 0  # rows of its tasks whose label is not ripe

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a number that is not finite is None."""
        return {"verdict": "promote" if self.promote else "refuse", **asdict(self)}


def judge(
    candidate: Path,
    champion: Path | None,
    datasets: Callable[[int], Dataset | None],
    split: str,
    margin: float | None = None,
    pool: int = 0,
    band: tuple[float, float] = CALIBRATION,
) -> Verdict:
    """Return the verdict on an exported model against another (or none), on a split of
    `datasets(0)`; query rows too few to tell a margin gain those of `datasets(1)` up to `pool`. Its
    mean prediction over the mean label is to lie in `band`."""
    served = load(candidate)
    # Its checksums were checked by whoever found it: it serves.
    champion_model = None if champion is None else load(champion, verify=False)
    scoring = served.config.judged_scoring
    metric = loss_metric(scoring.loss)
    ours: list[GatePredictions] = []
    theirs: list[GatePredictions] = []
    compared = _Comparison(scoring, metric, margin, band)
    for window in range(pool + 1):
        dataset = datasets(window)
        # Windows from before an input joined show nothing of it.
        if dataset is None or (window and not knows_inputs(served.config, dataset)):
            break
        # A window without a task says nothing; an unknown split is an error of predict_gate.
        if split in dataset.splits and not dataset.splits[split].num_episodes:
            continue
        ours.append(predict_gate(served, candidate, dataset, split))
        # With nothing to compare, more windows would decide nothing.
        if champion_model is None or champion is None:
            break
        theirs.append(predict_gate(champion_model, champion, dataset, split))
        # Windows are added by the width of the interval, never by where it lies: looking at the
        # difference and going on would promote by chance.
        if not _are_finite(ours) or not _are_finite(theirs) or compared.is_narrow(ours, theirs):
            break
    if not ours:
        return refuse_model(
            f"there is no task in split {split!r}, nor in that of earlier windows (pool {pool}): "
            "nothing to judge by"
        )
    newest = datasets(0)
    num_waiting = count_waiting(newest, split) if newest is not None else 0
    return replace(compared.decide(ours, theirs), num_waiting=num_waiting)


def refuse_model(why: str) -> Verdict:
    """Return the verdict on a model of which nothing was predicted, such as a diverged one."""
    return Verdict(False, [why], "", 0, 0, 0, None, None, None, {})


def windows_before(newest: Dataset) -> Callable[[int], Dataset | None]:
    """Return a function: `newest` for 0, the increment before it for 1, and so on; then None."""
    return lambda back: find_earlier_increment(newest, back) if back else newest


@dataclass(frozen=True)
class _Comparison:
    scoring: Scoring
    metric: str
    margin: float | None
    band: tuple[float, float] = CALIBRATION

    def is_narrow(self, ours: list[GatePredictions], theirs: list[GatePredictions]) -> bool:
        """Return whether the rows can tell a difference of the margin's size from none."""
        interval, champion = self._difference(ours, theirs)
        widest = NARROW * self._margin(champion)
        return not interval.reason and (interval.high - interval.low) / 2 <= widest

    def _margin(self, champion: Terms) -> float:
        # Of the champion's loss: a share means the same for clicks as for ratings.
        return MARGIN_SHARE * champion.value if self.margin is None else self.margin

    def _difference(
        self, ours: list[GatePredictions], theirs: list[GatePredictions]
    ) -> tuple[Interval, Terms]:
        candidate, champion = self._terms(ours)[self.metric], self._terms(theirs)[self.metric]
        resampled = bootstrap([champion, candidate])
        # Both by the same resamples: the tasks' own difficulty cancels out. Rounded: equal models
        # differ by 0.
        differences = np.round(resampled[0] - resampled[1], 12)
        return percentile_interval(differences, champion.num_tasks), champion

    def _terms(self, predicted: list[GatePredictions]) -> dict[str, Terms]:
        names = {
            "probability": ["auc", "logloss"],
            "rating": ["mae", "rmse"],
            "score": ["ndcg@10", "gauc", self.metric],
        }[predicted_by(self.scoring.loss)]
        label_N, prediction_N, task_N, weight_N = _join_windows(predicted)
        terms = split_terms(label_N, prediction_N, task_N, self.scoring, names)
        if self.metric in _ROW_LOSSES and np.ptp(weight_N):
            losses_N = _ROW_LOSSES[self.metric](label_N.astype(np.float64), prediction_N)
            terms[self.metric] = _weighted_terms(losses_N, task_N, weight_N)
        return terms

    def decide(self, ours: list[GatePredictions], theirs: list[GatePredictions]) -> Verdict:
        reasons: list[str] = []
        candidate = self._terms(ours)
        label_N, prediction_N, task_N, weight_N = _join_windows(ours)
        is_finite = _are_finite(ours)
        if not is_finite:
            count = int(np.count_nonzero(~np.isfinite(prediction_N)))
            reasons.append(f"{count:,} of {prediction_N.size:,} predictions are not finite")
        calibration = None
        if is_finite and self.scoring.loss == "bce":
            rows = label_N, prediction_N, task_N, weight_N
            calibration, why = _measure_calibration(*rows, self.band)
            # One that is nearer to 1 than the champion's is no reason to keep the champion.
            reasons += [] if theirs and _is_nearer(calibration, *_join_windows(theirs)) else why
        difference, margin, champion = None, None, {}
        if theirs and is_finite and _are_finite(theirs):
            interval, terms = self._difference(ours, theirs)
            margin = self._margin(terms)
            value = terms.value - candidate[self.metric].value
            difference, champion = (
                _measure(value, interval),
                to_optional_values(self._terms(theirs)),
            )
            if interval.reason:
                reasons.append(f"{self.metric} cannot be compared: {interval.reason}")
            elif interval.low < -margin:
                reasons.append(
                    f"{self.metric} may be worse by {-interval.low:.4g}, the margin is {margin:.4g}"
                    f" ({'worse' if interval.high < 0 else 'noise'}: better by {value:.4g}, 95 % "
                    f"{interval.low:.4g} to {interval.high:.4g}, over "
                    f"{format_count(terms.num_tasks, 'task')} of "
                    f"{format_count(len(ours), 'window')})"
                )
        return Verdict(
            promote=not reasons,
            reasons=reasons,
            metric=self.metric,
            num_tasks=len(np.unique(task_N)),
            num_rows=task_N.size,
            windows=len(ours),
            margin=margin,
            difference=difference,
            calibration=calibration,
            candidate=to_optional_values(candidate),
            champion=champion,
        )


# Of the metrics that candidates are compared by, those that are a mean over rows.
_ROW_LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "logloss": logloss_N,
    "mae": lambda label_N, prediction_N: np.abs(prediction_N - label_N),
}


def _weighted_terms(losses_N: Any, task_N: Any, weight_N: Any) -> Terms:
    _, code_N = np.unique(task_N, return_inverse=True)
    rows = weight_N * losses_N, weight_N
    num_T, den_T = (sum_T(one, code_N, int(code_N.max()) + 1) for one in rows)
    return Terms(float(num_T.sum() / den_T.sum()), num_T, den_T)


def _measure_calibration(
    label_N: Any,
    prediction_N: Any,
    task_N: Any,
    weight_N: Any,
    band: tuple[float, float] = CALIBRATION,
) -> tuple[Measure, list[str]]:
    """Return the mean prediction over the mean label, and why that is refused, if it is."""
    # A task of several windows is one task: its rows depend on each other.
    _, code_N = np.unique(task_N, return_inverse=True)
    num_tasks = int(code_N.max()) + 1
    label_T, prediction_T = (
        sum_T(one * weight_N, code_N, num_tasks) for one in (label_N, prediction_N)
    )
    if not label_T.sum():
        return Measure(None, None, None), ["no gate row has a positive label: nothing to judge by"]
    value = float(prediction_T.sum() / label_T.sum())
    # Every task is drawn, also one without a positive label.
    (resampled,) = bootstrap([Terms(value, prediction_T, label_T)])
    interval = percentile_interval(resampled, num_tasks)
    low, high = (value, value) if interval.reason else (interval.low, interval.high)
    ends = f"it {interval.reason}" if interval.reason else f"95 % {low:.3g} to {high:.3g}"
    problems = []
    # The interval must lie outside as a whole: few tasks alone refuse nobody.
    if high < band[0] or low > band[1]:
        problems = [
            f"predictions are {value:.3g} of the labels on average ({ends}), allowed are "
            f"{band[0]:g} to {band[1]:g}"
        ]
    return _measure(value, interval), problems


def _is_nearer(calibration: Measure, *rows: Any) -> bool:
    champion = _measure_calibration(*rows)[0].value
    if calibration.value is None or champion is None:
        return False
    return abs(math.log(max(calibration.value, TINY))) < abs(math.log(max(champion, TINY)))


def _join_windows(predicted: list[GatePredictions]) -> tuple[Any, Any, Any, Any]:
    windows = [(one.label_N, one.prediction_N, one.task_N, one.weight_N) for one in predicted]
    label_N, prediction_N, task_N, weight_N = map(np.concatenate, zip(*windows, strict=True))
    return label_N, prediction_N, task_N, weight_N


def _are_finite(predicted: list[GatePredictions]) -> bool:
    return all(np.isfinite(one.prediction_N).all() for one in predicted)


def _measure(value: float, interval: Interval) -> Measure:
    numbers = (value, interval.low, interval.high)
    return Measure(*(float(number) if np.isfinite(number) else None for number in numbers))
