"""Which charts a report has, and how each is drawn."""

from collections.abc import Sequence
from functools import partial
from textwrap import fill

from matplotlib.ticker import EngFormatter, MaxNLocator

from gmeta.evaluation.report import evaluation_schema as schema
from gmeta.evaluation.report.chart_files import Axes, Chart, Panel, PlotSeries, light_color
from gmeta.evaluation.report.curves import (
    make_activity_chart,
    make_support_chart,
    make_support_limit_chart,
)
from gmeta.evaluation.report.learning_curves import LearningCurve
from gmeta.evaluation.report.metric_lines import (
    WHISKERS,
    format_label_with_unit,
    list_points,
    measure_whiskers,
    spread_series,
    zero_if_undefined,
)
from gmeta.evaluation.report.task_charts import (
    make_gains_chart,
    make_story_chart,
    make_support_gain_chart,
)
from gmeta.evaluation.report.verdict import limit_groups
from gmeta.metrics.metric_info import MetricInfo
from gmeta.platform.pages.palette import NUM_SERIES_COLORS

MARKERS = ("o", "s", "^", "D")
# Drawn where they are reported; other metrics take their places by their order in the report.
USUAL_METRICS = ("mae", "ndcg@3", "auc", "gauc", "logloss")
MAX_CHARTED_METRICS = 3


def make_charts(evaluation: schema.Evaluation, curves: Sequence[LearningCurve]) -> list[Chart]:
    """Return every chart that there is data for, in the order of the page."""
    evaluation = limit_groups(evaluation)
    series = make_series(evaluation.runs, evaluation.yardsticks)
    own = [one for one in series if one.run == evaluation.runs[0].name]
    charts = [
        _make_groups_chart(evaluation, series),
        make_gains_chart(evaluation),
        make_support_gain_chart(evaluation),
        make_story_chart(evaluation),
        make_support_chart(evaluation, series),
        make_support_limit_chart(evaluation, series, choose_charted_metrics(evaluation)),
        make_activity_chart(evaluation, series),
        _make_calibration_chart(
            evaluation, [one for one in series if one in own or one.stage == "after"]
        ),
        _make_curve_chart(curves),
    ]
    return [chart for chart in charts if chart.panels]


def make_label_charts(evaluation: schema.Evaluation) -> list[Chart]:
    """Return the charts of a label that is not the judged one: of its calibration."""
    evaluation = limit_groups(evaluation)
    series = make_series(evaluation.runs, evaluation.yardsticks)
    own = [one for one in series if one.run == evaluation.runs[0].name]
    chart = _make_calibration_chart(evaluation, own)
    return [chart] if chart.panels else []


def choose_charted_metrics(evaluation: schema.Evaluation) -> list[str]:
    """Return the metrics that get a picture, the headline among them, in the order to draw."""
    names = list(evaluation.metrics)
    usual = [name for name in USUAL_METRICS if name in names]
    return list(dict.fromkeys([names[0], *usual, *names]))[:MAX_CHARTED_METRICS]


def make_series(
    runs: Sequence[schema.RunFacts], baselines: Sequence[schema.BaselineFacts] = ()
) -> list[PlotSeries]:
    """Return both stages of each run and the one stage of each baseline as series."""
    made: list[PlotSeries] = []
    models: list[schema.RunFacts | schema.BaselineFacts] = [*runs, *baselines]
    for index, model in enumerate(models):
        # From the fifth model on, colours repeat with other markers.
        color = f"series-{index % NUM_SERIES_COLORS}"
        marker = MARKERS[(index + index // NUM_SERIES_COLORS) % len(MARKERS)]
        if isinstance(model, schema.BaselineFacts):
            made.append(PlotSeries(model.name, "after", model.name, color, marker))
            continue
        for stage in schema.STAGES:
            label = f"{model.name}, {model.stage_label(stage)}"
            made.append(PlotSeries(model.name, stage, label, color, marker))
    return made


def _make_groups_chart(evaluation: schema.Evaluation, series: Sequence[PlotSeries]) -> Chart:
    height_inches = 1.0 + max(1.4, len(evaluation.groups) * (0.2 + 0.15 * len(series)))
    infos = {name: evaluation.metrics[name] for name in choose_charted_metrics(evaluation)}
    panels = [
        Panel(
            info.label,
            f"{info.label} of each group before and after adaptation, as in the tables",
            partial(_draw_groups, evaluation.groups, series, name, info),
            height_inches,
        )
        for name, info in infos.items()
    ]
    caption = (
        "Hollow: before a task's support set is seen; filled: after. Models whose lines overlap "
        "may still differ: the tables compare them task by task. "
    )
    return Chart(
        "groups", "Before and after adaptation, by group", caption + WHISKERS, panels, series
    )


def _draw_groups(
    groups: Sequence[schema.GroupEvaluation],
    series: Sequence[PlotSeries],
    name: str,
    info: MetricInfo,
    axes: Axes,
) -> None:
    for one, offset in zip(series, spread_series(len(series), 0.6), strict=True):
        found = ((row + offset, group.results) for row, group in enumerate(groups))
        rows, estimates = list_points(one, found, name)
        if rows:
            values = [estimate.value for estimate in estimates]
            style = {"linestyle": "none", "linewidth": 1.5, **one.style}
            axes.errorbar(values, rows, xerr=measure_whiskers(estimates), **style)
    # Wrapped: a long name would take the room of the axes.
    axes.set_yticks(range(len(groups)), [fill(group.name, 16) for group in groups])
    # Upside down: the first group is on top, as in the tables.
    axes.set_ylim(len(groups) - 0.5, -0.5)
    for row in range(1, len(groups)):
        axes.axhline(row - 0.5, color=light_color("line"), linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    better = "\N{LEFTWARDS ARROW} lower is better"
    if info.higher_is_better:
        better = "higher is better \N{RIGHTWARDS ARROW}"
    axes.set_xlabel(f"{format_label_with_unit(info)}   ({better})")


def _make_calibration_chart(evaluation: schema.Evaluation, series: Sequence[PlotSeries]) -> Chart:
    panels = [
        Panel(
            group.name,
            f"Share of positives against predicted probability for {group.name}",
            partial(_draw_calibration, group, series),
        )
        for group in evaluation.groups
        if any(one.run == evaluation.runs[0].name for one in group.calibration)
    ]
    caption = (
        "Ten bins of equally many rows. On the diagonal predicted probabilities come true; below "
        "it the model promises too much. "
    )
    return Chart("calibration", "Calibration", caption + WHISKERS, panels, series)


def _draw_calibration(
    group: schema.GroupEvaluation, series: Sequence[PlotSeries], axes: Axes
) -> None:
    top = 0.0
    for one in series:
        for found in group.calibration:
            if (found.run, found.stage) == (one.run, one.stage):
                predicted = [bin_.mean_probability for bin_ in found.bins]
                observed = [bin_.positive_share for bin_ in found.bins]
                shares = [estimate.value for estimate in observed]
                style = {"linewidth": 1.3, **one.style}
                axes.errorbar(predicted, shares, yerr=measure_whiskers(observed), **style)
                highs = [zero_if_undefined(estimate.high) for estimate in observed]
                top = max(top, *predicted, *shares, *highs)
    # Where clicks are rare, axes up to 1 would press all bins into a corner.
    limit = min(1.0, 1.05 * top) or 1.0
    diagonal, color = ([0, limit], [0, limit]), light_color("muted")
    axes.plot(*diagonal, color=color, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set(xlim=(0, limit), ylim=(0, limit))
    axes.set(xlabel="mean predicted probability", ylabel="share of positives")
    axes.grid(axis="both")


def _make_curve_chart(curves: Sequence[LearningCurve]) -> Chart:
    panels = [
        Panel(curve.title, f"{curve.title} against the outer step", partial(_draw_curve, curve))
        for curve in curves
    ]
    smoothed = any(curve.smooth.size for curve in curves)
    caption = "Pale: logged values; strong: their running mean." if smoothed else ""
    return Chart("learning_curve", "Learning curve", caption, panels)


def _draw_curve(curve: LearningCurve, axes: Axes) -> None:
    color = light_color(curve.color_name)
    if curve.smooth.size:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=1)
        axes.plot(curve.steps, curve.smooth, color=color, linewidth=1.8)
    else:
        axes.plot(curve.steps, curve.values, color=color, linewidth=1.8, marker="o", markersize=4)
    axes.set(xlabel="outer step", ylabel=curve.axis_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="both")
