"""Pictures of metrics as lines: over support sizes, over limited numbers of support rows, and over
tasks from little to very active."""

from collections.abc import Sequence
from functools import partial

from gmeta.report.evaluation import Evaluation, Group, RowsBin
from gmeta.report.lines import WHISKERS, count, draw_lines
from gmeta.report.render import Chart, Panel, Series


def support_chart(evaluation: Evaluation, series: Sequence[Series]) -> Chart:
    """Return the headline metric by how many support rows a task has."""
    panels = [
        _panel_of_bins(evaluation, group, group.by_support_rows, "support rows", series)
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


def activity_chart(evaluation: Evaluation, series: Sequence[Series]) -> Chart:
    """Return the headline metric by how many rows a task has, where that differs from its support
    size."""
    panels = [
        _panel_of_bins(evaluation, group, group.by_activity, "rows of a task", series)
        for group in evaluation.groups
        if len(group.by_activity) > 1 and not _as_by_support(group)
    ]
    caption = "Rows of a task, support and query together; each bin holds other tasks. "
    label = evaluation.metrics[evaluation.headline].label
    return Chart("activity", f"{label} by activity", caption + WHISKERS, panels, series)


def _as_by_support(group: Group) -> bool:
    """Return whether these bins are those by support size: of equally many query rows."""
    of_activity, of_support = (
        [one.results for one in bins] for bins in (group.by_activity, group.by_support_rows)
    )
    # As text: an estimate that is not known is NaN, which equals nothing.
    return repr(of_activity) == repr(of_support)


def _panel_of_bins(
    evaluation: Evaluation,
    group: Group,
    bins: Sequence[RowsBin],
    rows: str,
    series: Sequence[Series],
) -> Panel:
    """Return the headline metric of a group over bins of tasks by their number of `rows`."""
    name = evaluation.headline
    info = evaluation.metrics[name]
    ticks = [f"{one.label}\n{count(one.num_tasks)}" for one in bins]
    results, told = [one.results for one in bins], f"{rows}; below, the number of tasks"
    return Panel(
        group.name,
        f"{info.label} of {group.name} against the number of {rows}",
        partial(draw_lines, results, ticks, told, series, name, info),
    )


def support_limit_chart(
    evaluation: Evaluation, series: Sequence[Series], names: Sequence[str]
) -> Chart:
    """Return these metrics after adapting on limited numbers of support rows, group by group."""
    adapted = [one for one in series if one.stage == "after"]
    told = "support rows shown; below, the tasks that have as many"
    panels = [
        Panel(
            f"{group.name}: {evaluation.metrics[name].label}",
            f"{evaluation.metrics[name].label} of {group.name} against the number of support rows "
            "that are shown",
            partial(
                draw_lines,
                [one.results for one in limits],
                [f"{one.max_support_rows}\n{count(one.num_tasks_full)}" for one in limits],
                told,
                adapted,
                name,
                evaluation.metrics[name],
            ),
        )
        for group in evaluation.groups
        if (limits := group.by_support_limit)
        for name in names
    ]
    caption = (
        "The same tasks and query rows throughout; of each task's support rows no more than so "
        "many are shown, chosen by chance. A task with fewer shows all it has. "
    )
    return Chart("few_support_rows", "With few support rows", caption + WHISKERS, panels, adapted)
