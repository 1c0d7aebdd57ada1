"""Draws metrics as lines: over support sizes, limits of support rows, and rows of a task."""

from collections.abc import Sequence
from functools import partial

from gmeta.evaluation.report.chart_files import Chart, Panel, PlotSeries
from gmeta.evaluation.report.evaluation_schema import Evaluation, GroupEvaluation, RowsBin
from gmeta.evaluation.report.metric_lines import WHISKERS, draw_lines, format_count


def make_support_chart(evaluation: Evaluation, series: Sequence[PlotSeries]) -> Chart:
    """Return the headline metric by how many support rows a task has."""
    panels = [
        _make_bins_panel(evaluation, group, group.by_support_rows, "support rows", series)
        for group in evaluation.groups
        if len(group.by_support_rows) > 1
    ]
    caption = (
        "Dotted: before a task's support set is seen; solid: after. Each bin holds other tasks, "
        "so compare models within a bin. "
    )
    label = evaluation.metrics[evaluation.headline].label
    return Chart(
        "support_size", f"{label} against support size", caption + WHISKERS, panels, series
    )


def make_activity_chart(evaluation: Evaluation, series: Sequence[PlotSeries]) -> Chart:
    """Return the headline metric by how many rows a task has, if that is not its support size."""
    panels = [
        _make_bins_panel(evaluation, group, group.by_activity, "rows of a task", series)
        for group in evaluation.groups
        # As text: an estimate that is not known is NaN, which equals nothing.
        if len(group.by_activity) > 1
        and repr([one.results for one in group.by_activity])
        != repr([one.results for one in group.by_support_rows])
    ]
    caption = "Rows of a task, support and query together; each bin holds other tasks. "
    label = evaluation.metrics[evaluation.headline].label
    return Chart("activity", f"{label} by activity", caption + WHISKERS, panels, series)


def _make_bins_panel(
    evaluation: Evaluation,
    group: GroupEvaluation,
    bins: Sequence[RowsBin],
    rows: str,
    series: Sequence[PlotSeries],
) -> Panel:
    name = evaluation.headline
    info = evaluation.metrics[name]
    ticks = [f"{one.label}\n{format_count(one.num_tasks)}" for one in bins]
    results, axis_title = [one.results for one in bins], f"{rows}; below, the number of tasks"
    return Panel(
        group.name,
        f"{info.label} of {group.name} against the number of {rows}",
        partial(draw_lines, results, ticks, axis_title, series, name, info),
    )


def make_support_limit_chart(
    evaluation: Evaluation, series: Sequence[PlotSeries], names: Sequence[str]
) -> Chart:
    """Return these metrics after adapting on limited numbers of support rows, group by group."""
    adapted = [one for one in series if one.stage == "after"]
    axis_title = "support rows shown; below, the tasks that have as many"
    panels = []
    for group in evaluation.groups:
        limits = group.by_support_limit
        results = [one.results for one in limits]
        ticks = [f"{one.max_support_rows}\n{format_count(one.num_tasks_full)}" for one in limits]
        for name in names if limits else ():
            info = evaluation.metrics[name]
            draw = partial(draw_lines, results, ticks, axis_title, adapted, name, info)
            text = f"{info.label} of {group.name} against the number of support rows that are shown"
            panels.append(Panel(f"{group.name}: {info.label}", text, draw))
    caption = (
        "The same tasks and query rows throughout; of each task's support rows no more than so "
        "many are shown, chosen by chance. A task with fewer shows all it has. "
    )
    return Chart("few_support_rows", "With few support rows", caption + WHISKERS, panels, adapted)
