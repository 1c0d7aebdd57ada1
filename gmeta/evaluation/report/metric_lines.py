"""Draws metrics with their intervals, as points and as lines over bins or sizes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gmeta.evaluation.report.chart_files import Axes, PlotSeries
from gmeta.evaluation.report.evaluation_schema import MetricEstimate, StageResult
from gmeta.metrics.metric_info import MetricInfo

WHISKERS = (
    "Lines through the points are 95 % intervals over tasks; no line: fewer than ten tasks to tell "
    "it by."
)


def draw_lines(
    results: Sequence[Sequence[StageResult]],
    ticks: Sequence[str],
    label: str,
    series: Sequence[PlotSeries],
    name: str,
    info: MetricInfo,
    axes: Axes,
) -> None:
    """Draw a metric of each series over a labelled axis; `results` has one entry for each tick."""
    # Side by side: whiskers upon each other could not be read.
    for one, offset in zip(series, spread_series(len(series), 0.36), strict=True):
        placed = ((at + offset, found) for at, found in enumerate(results))
        places, estimates = list_points(one, placed, name)
        if places:
            values = [estimate.value for estimate in estimates]
            dashes = "-" if one.stage == "after" else (0, (2, 2))
            style = {"linestyle": dashes, "linewidth": 1.3, **one.style}
            axes.errorbar(places, values, yerr=measure_whiskers(estimates), **style)
    axes.set_xticks(range(len(ticks)), list(ticks))
    axes.set_xlabel(label)
    axes.set_ylabel(format_axis_label(info))
    axes.grid(axis="y")


def list_points(
    series: PlotSeries, placed: Iterable[tuple[float, Sequence[StageResult]]], name: str
) -> tuple[list[float], list[MetricEstimate]]:
    """Return places and estimates of a series, without those that are undefined or missing."""
    places, estimates = [], []
    for place, results in placed:
        for result in results:
            estimate = result.metrics[name]
            if (result.run, result.stage) == (series.run, series.stage) and math.isfinite(
                estimate.value
            ):
                places.append(place)
                estimates.append(estimate)
    return places, estimates


def spread_series(num_series: int, width: float) -> Sequence[float]:
    """Return the places of the series side by side around 0."""
    step = width / max(1, num_series - 1)
    return [(index - (num_series - 1) / 2) * step for index in range(num_series)]


def measure_whiskers(estimates: Sequence[MetricEstimate]) -> Any:
    """Return the distances [2, points] to both ends of the intervals, 0 where there is none."""
    # A skewed metric may lie a little outside its interval; matplotlib refuses negative lengths.
    below = [max(0.0, zero_if_undefined(one.value - one.low)) for one in estimates]
    above = [max(0.0, zero_if_undefined(one.high - one.value)) for one in estimates]
    return np.array([below, above])


def zero_if_undefined(value: float) -> float:
    """Return the value, 0 where it is not finite."""
    return value if math.isfinite(value) else 0.0


def format_axis_label(info: MetricInfo) -> str:
    """Return a metric's label with its unit and, below, which values are better."""
    better = "higher" if info.higher_is_better else "lower"
    return f"{format_label_with_unit(info)}\n({better} is better)"


def format_label_with_unit(info: MetricInfo) -> str:
    """Return a metric's label with its unit."""
    return f"{info.label}, {info.unit}" if info.unit else info.label


def format_count(number: int) -> str:
    """Return a number of tasks as text below an axis."""
    return str(number) if number < 10_000 else f"{number / 1000:.0f}k"
