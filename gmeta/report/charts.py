"""Which pictures a report has and what each draws; how they become files is render's business."""

from collections.abc import Sequence
from functools import partial
from textwrap import fill

from matplotlib.ticker import EngFormatter, MaxNLocator

from gmeta.metrics.texts import MetricInfo
from gmeta.report.curves import activity_chart, support_chart, support_limit_chart
from gmeta.report.evaluation import (
    STAGES,
    Evaluation,
    Group,
    RunFacts,
    YardstickFacts,
)
from gmeta.report.history import Curve
from gmeta.report.lines import (
    WHISKERS,
    offsets,
    or_zero,
    points,
    whiskers,
    with_unit,
)
from gmeta.report.render import NUM_SERIES_COLORS, Axes, Chart, Panel, Series, light

MARKERS = ("o", "s", "^", "D")
# Drawn where they are reported; other metrics take their places by their order in the report.
USUALLY_CHARTED = ("mae", "ndcg@3", "auc", "gauc", "logloss")
NUM_CHARTED = 3


def charts_of(evaluation: Evaluation, curves: Sequence[Curve]) -> list[Chart]:
    """Return every chart that there is data for, in the order of the page."""
    series = series_of(evaluation.runs, evaluation.yardsticks)
    own = [one for one in series if one.run == evaluation.runs[0].name]
    charts = [
        _groups_chart(evaluation, series),
        support_chart(evaluation, series),
        support_limit_chart(evaluation, series, charted_metrics(evaluation)),
        activity_chart(evaluation, series),
        _calibration_chart(evaluation, own),
        _curve_chart(curves),
    ]
    return [chart for chart in charts if chart.panels]


def label_charts(evaluation: Evaluation) -> list[Chart]:
    """Return the charts of a label that is not the judged one: of its calibration."""
    series = series_of(evaluation.runs, evaluation.yardsticks)
    own = [one for one in series if one.run == evaluation.runs[0].name]
    chart = _calibration_chart(evaluation, own)
    return [chart] if chart.panels else []


def charted_metrics(evaluation: Evaluation) -> list[str]:
    """Return the metrics that get a picture, the headline among them, in the order to draw."""
    names = list(evaluation.metrics)
    usual = [name for name in USUALLY_CHARTED if name in names]
    return list(dict.fromkeys([names[0], *usual, *names]))[:NUM_CHARTED]


def series_of(runs: Sequence[RunFacts], yardsticks: Sequence[YardstickFacts] = ()) -> list[Series]:
    """Return both stages of each run and the one stage of each yardstick as series; from the fifth
    model on, colours repeat with other markers."""
    made: list[Series] = []
    models: list[RunFacts | YardstickFacts] = [*runs, *yardsticks]
    for index, model in enumerate(models):
        color = f"series-{index % NUM_SERIES_COLORS}"
        marker = MARKERS[(index + index // NUM_SERIES_COLORS) % len(MARKERS)]
        if isinstance(model, YardstickFacts):
            made.append(Series(model.name, "after", model.name, color, marker))
            continue
        for stage in STAGES:
            label = f"{model.name}, {model.stage_label(stage)}"
            made.append(Series(model.name, stage, label, color, marker))
    return made


def _groups_chart(evaluation: Evaluation, series: Sequence[Series]) -> Chart:
    height_inches = 1.0 + max(1.4, len(evaluation.groups) * (0.2 + 0.15 * len(series)))
    infos = {name: evaluation.metrics[name] for name in charted_metrics(evaluation)}
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
    groups: Sequence[Group], series: Sequence[Series], name: str, info: MetricInfo, axes: Axes
) -> None:
    for one, offset in zip(series, offsets(len(series), 0.6), strict=True):
        found = ((row + offset, group.results) for row, group in enumerate(groups))
        rows, estimates = points(one, found, name)
        if rows:
            values = [estimate.value for estimate in estimates]
            axes.errorbar(
                values,
                rows,
                xerr=whiskers(estimates),
                linestyle="none",
                linewidth=1.5,
                **one.style,
            )
    # Wrapped: a long name would take the room of the axes.
    axes.set_yticks(range(len(groups)), [fill(group.name, 16) for group in groups])
    # Upside down: the first group stands on top, as in the tables.
    axes.set_ylim(len(groups) - 0.5, -0.5)
    for row in range(1, len(groups)):
        axes.axhline(row - 0.5, color=light("line"), linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    arrow = (
        "higher is better \N{RIGHTWARDS ARROW}"
        if info.higher_is_better
        else "\N{LEFTWARDS ARROW} lower is better"
    )
    axes.set_xlabel(f"{with_unit(info)}   ({arrow})")


def _calibration_chart(evaluation: Evaluation, series: Sequence[Series]) -> Chart:
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


def _draw_calibration(group: Group, series: Sequence[Series], axes: Axes) -> None:
    top = 0.0
    for one in series:
        for found in group.calibration:
            if (found.run, found.stage) == (one.run, one.stage):
                predicted = [bin_.mean_probability for bin_ in found.bins]
                observed = [bin_.positive_share for bin_ in found.bins]
                shares = [estimate.value for estimate in observed]
                axes.errorbar(
                    predicted, shares, yerr=whiskers(observed), linewidth=1.3, **one.style
                )
                top = max(
                    top, *predicted, *shares, *(or_zero(estimate.high) for estimate in observed)
                )
    # Where clicks are rare, axes up to 1 would press all bins into a corner.
    limit = min(1.0, 1.05 * top) or 1.0
    axes.plot(
        [0, limit], [0, limit], color=light("muted"), linewidth=1, linestyle=(0, (4, 3)), zorder=0
    )
    axes.set(
        xlim=(0, limit),
        ylim=(0, limit),
        xlabel="mean predicted probability",
        ylabel="share of positives",
    )
    axes.grid(axis="both")


def _curve_chart(curves: Sequence[Curve]) -> Chart:
    panels = [
        Panel(curve.title, f"{curve.title} against the outer step", partial(_draw_curve, curve))
        for curve in curves
    ]
    smoothed = any(curve.smooth.size for curve in curves)
    caption = "Pale: logged values; strong: their running mean." if smoothed else ""
    return Chart("learning_curve", "Learning curve", caption, panels)


def _draw_curve(curve: Curve, axes: Axes) -> None:
    color = light(curve.color_name)
    if curve.smooth.size:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=1)
        axes.plot(curve.steps, curve.smooth, color=color, linewidth=1.8)
    else:
        axes.plot(curve.steps, curve.values, color=color, linewidth=1.8, marker="o", markersize=4)
    axes.set(xlabel="outer step", ylabel=curve.axis_label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="both")
