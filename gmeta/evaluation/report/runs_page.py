"""Draws runs beside each other as one HTML page: learning curves, best scores, keys that differ."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.ticker import EngFormatter, MaxNLocator

from gmeta.evaluation.report.chart_files import Axes, Chart, Panel, PlotSeries, light_color
from gmeta.evaluation.report.html_page import draw_panels
from gmeta.evaluation.report.learning_curves import LearningCurve, make_learning_curves
from gmeta.platform.pages.palette import MARKS, NUM_SERIES_COLORS
from gmeta.platform.pages.templates import load_template
from gmeta.runs.early_stop import make_early_stop, make_scoring
from gmeta.runs.listing import RunSummary
from gmeta.runs.run_folder import RunFolder

# From the fifth run on colours repeat, and curves could not be told apart.
MAX_RUNS = NUM_SERIES_COLORS


def render_runs(
    folders: Sequence[RunFolder],
    summaries: Sequence[RunSummary],
    differing: Sequence[tuple[str, Sequence[Any]]],
) -> str:
    """Return the page of up to MAX_RUNS runs, which are summarised in this order."""
    series = [
        PlotSeries(one.run, "after", one.run, f"series-{at}", list(MARKS)[at])
        for at, one in enumerate(summaries)
    ]
    configs = [folder.read_config() for folder in folders]
    curves = [
        make_learning_curves(folder.read_metrics(), make_scoring(one), loss_name=one.loss_name())
        for folder, one in zip(folders, configs, strict=True)
    ]
    titles = list(dict.fromkeys(curve.title for of_run in curves for curve in of_run))
    panels = [_make_panel(title, curves, series) for title in titles]
    chart = Chart("runs", "Learning curves", "Running means of the training loss.", panels, series)
    tiles = [
        ("-" if one.best is None else f"{one.best:.4f}", one.run, _describe_best(one), "")
        for one in summaries
    ]
    return load_template("gmeta.evaluation.report", "runs.html").render(
        summaries=summaries,
        verdict=judge_runs(summaries, make_early_stop(configs[0]).higher_is_better),
        tiles=tiles,
        charts=[draw_panels(chart)] if panels else [],
        differing=differing,
    )


def _make_panel(
    title: str, curves: Sequence[Sequence[LearningCurve]], series: Sequence[PlotSeries]
) -> Panel:
    drawn = [
        (curve, one)
        for of_run, one in zip(curves, series, strict=True)
        for curve in of_run
        if curve.title == title
    ]
    names = ", ".join(one.label for _, one in drawn)
    return Panel(title, f"{title} against the step of {names}", partial(_draw_curves, drawn))


def _draw_curves(drawn: Sequence[tuple[LearningCurve, PlotSeries]], axes: Axes) -> None:
    for curve, one in drawn:
        values = curve.smooth if curve.smooth.size else curve.values
        # A single validation makes no line.
        marker = one.marker if len(values) == 1 else ""
        color = light_color(one.color_name)
        axes.plot(curve.steps, values, color=color, linewidth=1.8, marker=marker)
    axes.set(xlabel="outer step", ylabel=drawn[0][0].axis_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="both")


def _describe_best(one: RunSummary) -> str:
    if one.best is None:
        return "no validation yet"
    return f"{one.metric} at step {one.best_step:,}"


def judge_runs(summaries: Sequence[RunSummary], higher_is_better: bool) -> str:
    """Return which run is ahead, if all were validated by one metric."""
    scored = [one for one in summaries if one.best is not None and math.isfinite(one.best)]
    if len(scored) < len(summaries) or len({one.metric for one in scored}) > 1:
        return "Not all of these runs have a validation by the same metric: none is ahead."
    first, second, *_ = sorted(scored, key=lambda one: one.best or 0.0, reverse=higher_is_better)
    gap = abs((first.best or 0.0) - (second.best or 0.0))
    if not gap:
        return f"These runs are level on validation, at {first.best:.4f} {first.metric}."
    return (
        f"{first.run} is ahead on validation, by {gap:.4f} {first.metric}. "
        "Validation chose its checkpoint: gmeta evaluate says whether the difference is more than "
        "chance."
    )
