"""Pictures of how much a model makes of few support rows, and of little and much active tasks."""

from collections.abc import Sequence
from functools import partial

from gmeta.metrics.texts import MetricInfo
from gmeta.report.evaluation import Evaluation, Group
from gmeta.report.lines import WHISKERS, count, draw_lines
from gmeta.report.render import Axes, Chart, Panel, Series


def support_limit_chart(
    evaluation: Evaluation, series: Sequence[Series], names: Sequence[str]
) -> Chart:
    """Return these metrics after adapting on no more than so many support rows, group by group."""
    adapted = [one for one in series if one.stage == "after"]
    panels = [
        Panel(
            f"{group.name}: {evaluation.metrics[name].label}",
            f"{evaluation.metrics[name].label} of {group.name} against the number of support rows "
            "that are shown",
            partial(_draw_limits, group, adapted, name, evaluation.metrics[name]),
        )
        for group in evaluation.groups
        for name in names
        if group.by_support_limit
    ]
    caption = (
        "The same tasks and query rows throughout; of each task's support rows no more than so "
        "many are shown, chosen by chance. A task with fewer shows all it has. "
    )
    return Chart("few_support_rows", "With few support rows", caption + WHISKERS, panels, adapted)


def _draw_limits(
    group: Group, series: Sequence[Series], name: str, info: MetricInfo, axes: Axes
) -> None:
    limits = group.by_support_limit
    ticks = [f"{one.max_support_rows}\n{count(one.num_tasks_full)}" for one in limits]
    draw_lines([one.results for one in limits], ticks, series, name, info, axes)
    axes.set_xlabel("support rows shown; below, the tasks that have as many")


def activity_chart(evaluation: Evaluation, series: Sequence[Series]) -> Chart:
    """Return the headline metric by how many rows a task has, where that is not its support size
    over again.
    """
    info = evaluation.metrics[evaluation.headline]
    panels = [
        Panel(
            group.name,
            f"{info.label} of {group.name} against the number of rows of a task",
            partial(_draw_activity, group, series, evaluation.headline, info),
        )
        for group in evaluation.groups
        if len(group.by_activity) > 1 and not _as_by_support(group)
    ]
    caption = "Rows of a task, support and query together; each bin holds other tasks. "
    return Chart("activity", f"{info.label} by activity", caption + WHISKERS, panels, series)


def _as_by_support(group: Group) -> bool:
    """Return whether these bins are those by support size: of equally many query rows."""
    return [one.results for one in group.by_activity] == [
        one.results for one in group.by_support_rows
    ]


def _draw_activity(
    group: Group, series: Sequence[Series], name: str, info: MetricInfo, axes: Axes
) -> None:
    bins = group.by_activity
    ticks = [f"{one.label}\n{count(one.num_tasks)}" for one in bins]
    draw_lines([one.results for one in bins], ticks, series, name, info, axes)
    axes.set_xlabel("rows of a task; below, the number of tasks")
