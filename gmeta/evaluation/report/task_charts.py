"""Draws what adapting gives: each task's gain, the gain by support rows, and one task's story."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.ticker import MaxNLocator

from gmeta.evaluation.report.chart_files import Axes, Chart, Panel, light_color
from gmeta.evaluation.report.evaluation_schema import Evaluation, RowsBin, TaskGains, TaskStory
from gmeta.evaluation.report.metric_lines import format_count, zero_if_undefined

WORDS = {"logloss": "logloss", "mae": "absolute error"}


def make_gains_chart(evaluation: Evaluation) -> Chart:
    """Return the histogram of gains over tasks, group by group."""
    panels = [
        Panel(
            f"{group.name}: {gains.share_worse:.0%} of tasks worse off",
            f"Tasks of {group.name} by how much adapting lowers their {WORDS[gains.loss]}; "
            f"{gains.share_better:.0%} better off, {gains.share_worse:.0%} worse off",
            partial(_draw_gains, gains),
        )
        for group in evaluation.groups
        if (gains := group.task_gains)
    ]
    caption = "Right of 0: tasks that adapting predicts better. Both ends hold what lies beyond."
    return Chart("task_gains", "What adapting gives each task", caption, panels)


def make_support_gain_chart(evaluation: Evaluation) -> Chart:
    """Return the gain in the headline metric by the number of support rows, group by group."""
    info = evaluation.metrics[evaluation.headline]
    panels = [
        Panel(
            group.name,
            f"{info.label} of {group.name}, adapted minus before, by support rows",
            partial(_draw_support_gain, group.by_support_rows, info.label, info.higher_is_better),
        )
        for group in evaluation.groups
        if sum(one.gain is not None for one in group.by_support_rows) > 1
    ]
    caption = (
        "Adapted minus before, with 95 % intervals over tasks. Below the axis, the number of tasks."
    )
    return Chart("support_gain", "How much each support row is worth", caption, panels)


def make_story_chart(evaluation: Evaluation) -> Chart:
    """Return one task of each group, as more and more of its support rows are shown."""
    panels = [
        Panel(
            f"{group.name}: task {story.task}",
            f"Predictions of the query rows of task {story.task} by the support rows shown",
            partial(_draw_story, story),
        )
        for group in evaluation.groups
        if (story := group.story)
    ]
    caption = (
        "The task of median gain. A line is a query row: strong where its label is above the "
        "task's mean, pale where not. Adapting works where the two kinds part."
    )
    return Chart("one_task", "One task, row by row", caption, panels)


def _draw_gains(gains: TaskGains, axes: Axes) -> None:
    edges = np.array(gains.edges)
    middles, width = (edges[1:] + edges[:-1]) / 2, float(edges[1] - edges[0])
    colors = [light_color("series-0" if at > 0 else "series-1") for at in middles]
    axes.bar(middles, gains.num_tasks_in_bin, width=0.9 * width, color=colors)
    axes.axvline(0, color=light_color("muted"), linewidth=1)
    axes.axvline(gains.median, color=light_color("ink"), linewidth=1.3, linestyle=(0, (4, 3)))
    axes.set(xlabel=f"{WORDS[gains.loss]} before minus adapted; dashed: median", ylabel="tasks")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")


def _draw_support_gain(
    bins: Sequence[RowsBin], label: str, higher_is_better: bool, axes: Axes
) -> None:
    for at, one in enumerate(bins):
        gain = one.gain
        if gain is None or gain.value != gain.value:
            continue
        good = (gain.value > 0) == higher_is_better
        below = max(0.0, zero_if_undefined(gain.value - gain.low))
        above = max(0.0, zero_if_undefined(gain.high - gain.value))
        color = light_color("series-0" if good else "series-1")
        axes.errorbar(
            [at], [gain.value], yerr=[[below], [above]], color=color, marker="o", markersize=6
        )
    axes.axhline(0, color=light_color("muted"), linewidth=1)
    axes.set_xticks(
        range(len(bins)), [f"{one.label}\n{format_count(one.num_tasks)}" for one in bins]
    )
    axes.set(xlabel="support rows; below, the number of tasks", ylabel=f"{label}, change")
    axes.grid(axis="y")


def _draw_story(story: TaskStory, axes: Axes) -> None:
    middle = sum(story.labels) / len(story.labels)
    for row, label in enumerate(story.labels):
        is_high = label > middle
        axes.plot(
            range(len(story.support_rows)),
            [found[row] for found in story.predictions],
            color=light_color("series-0" if is_high else "series-1"),
            alpha=1.0 if is_high else 0.45,
            linewidth=1.8 if is_high else 1.3,
            marker="o",
            markersize=3.5,
        )
    axes.set_xticks(range(len(story.support_rows)), list(map(str, story.support_rows)))
    axes.set(xlabel="support rows shown", ylabel="prediction")
    axes.grid(axis="y")
