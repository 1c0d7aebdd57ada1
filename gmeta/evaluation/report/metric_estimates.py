"""Estimates of metrics with intervals, and differences with their verdicts.

Over several draws of support and query rows a metric is the mean of its values, and an interval
resamples tasks, each with all its draws. A task's draws are independent of other tasks', so this
covers both spreads (Davison & Hinkley 1997, Bootstrap Methods and their Application, section 3.8,
the first of two ways; resampling draws within tasks too would count their spread twice)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gmeta.evaluation.report.evaluated_runs import SplitRows
from gmeta.evaluation.report.evaluation_schema import Difference, MetricEstimate, Stage, Verdict
from gmeta.evaluation.report.intervals import Interval, bootstrap, percentile_interval
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.metric_info import MetricInfo
from gmeta.metrics.scores import split_terms
from gmeta.metrics.terms import Floats, Terms

# T tasks, B resamples, D draws

# The ends of an interval then vary by 2 % of its width: sqrt(p (1 - p) / B) / density at p = 2.5 %.
RESAMPLES = 1000
SEED = 0

UNKNOWN: tuple[float, float, float, Verdict] = (math.nan, math.nan, math.nan, "unknown")


@dataclass(frozen=True)
class MeasuredMetric:
    """A metric over draws: by draw, and the mean over draws on each resample of tasks."""

    # NaN, with the reason, where a draw leaves the metric undefined.
    by_draw: Floats
    # The tasks that count in every draw.
    num_tasks: int
    reason: str
    resampled: Floats
    no_interval: str = ""  # why there is none

    @property
    def value(self) -> float:
        """Return the mean over draws."""
        return float(self.by_draw.mean())

    def estimate(self) -> MetricEstimate:
        """Return the metric with its interval."""
        if self.reason:
            return MetricEstimate(math.nan, math.nan, math.nan, 0, self.reason)
        interval = percentile_interval(self.resampled, self.num_tasks)
        if self.no_interval:
            interval = Interval(math.nan, math.nan, self.no_interval)
        return MetricEstimate(
            self.value, interval.low, interval.high, self.num_tasks, interval.reason
        )


def measure_metrics(
    draws: Sequence[SplitRows], stage: Stage, scoring: Scoring, names: Sequence[str] = ()
) -> dict[str, MeasuredMetric]:
    """Return the metrics of a model at a stage: those of the scoring, or `names`."""
    made: list[dict[str, Terms]] = []
    resampled = np.zeros(0)
    # A label that is not always known may leave a task rows in only some of the draws.
    tasks_T = np.unique(np.concatenate([rows.task_N for rows in draws]))
    # One draw after the other: of a million tasks the sums of all draws would take gigabytes.
    for rows in draws:
        columns_N = rows.label_N, rows.prediction_N(stage), rows.task_N
        terms = split_terms(*columns_N, scoring, names, rows.places_N2(stage), tasks=tasks_T)
        # Equal seeds and numbers of tasks give equal resamples: the results of two calls pair up.
        drawn = bootstrap(list(terms.values()), RESAMPLES, SEED) / len(draws)
        resampled = resampled + drawn if made else drawn
        made.append(terms)
    return {
        name: combine_draws([terms[name] for terms in made], resampled[index])
        for index, name in enumerate(made[0])
    }


def combine_draws(terms: Sequence[Terms], resampled: Floats) -> MeasuredMetric:
    """Return a metric from its terms in each draw, and from the means of its resampled values."""
    reasons = [
        (f"draw {draw}: " if len(terms) > 1 else "") + one.reason
        for draw, one in enumerate(terms)
        if one.reason
    ]
    return MeasuredMetric(
        by_draw=np.array([one.value for one in terms]),
        num_tasks=min(one.num_tasks for one in terms),
        reason=reasons[0] if reasons else "",
        resampled=resampled,
        no_interval=terms[0].no_interval,
    )


def compare(one: MeasuredMetric, other: MeasuredMetric, info: MetricInfo) -> Difference:
    """Return one minus the other with its interval and verdict."""
    # Equal models whose rows stand in another order differ in the last bits of their sums.
    differences = np.round(one.resampled - other.resampled, 12)
    interval = percentile_interval(differences, min(one.num_tasks, other.num_tasks))
    value = one.value - other.value
    verdict = _decide_verdict(interval, info)
    return Difference(value, interval.low, interval.high, verdict, interval.reason)


def _decide_verdict(interval: Interval, info: MetricInfo) -> Verdict:
    if interval.reason:
        return "unknown"
    # No resample differs: the two are one model, or one copied onto the other.
    if interval.low == interval.high == 0:
        return "same"
    if interval.low <= 0 <= interval.high:
        return "noise"
    return "better" if (interval.low > 0) == info.higher_is_better else "worse"
