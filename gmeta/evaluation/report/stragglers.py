"""Draws a straggler study: one panel a scenario, one bar a method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gmeta.evaluation.report.chart_files import Axes, Chart, Panel, light_color

if TYPE_CHECKING:
    from gmeta.antdt.simulation.scenario_study import StudyResult


def completion_chart(results: Sequence[StudyResult], subtitle: str) -> Chart:
    """Return a chart of job completion times relative to a cluster without stragglers."""
    scenarios = list(dict.fromkeys(result.scenario for result in results))
    methods = list(dict.fromkeys(result.method for result in results))
    longest = max(result.slowdown for result in results)
    panels = [
        Panel(
            f"{scenario} stragglers",
            f"Job completion time of every method with {scenario} stragglers",
            partial(_draw, [r for r in results if r.scenario == scenario], longest),
            0.9 + 0.34 * len(methods),
        )
        for scenario in scenarios
    ]
    return Chart("antdt_sim", f"Job completion time, {subtitle}", "", panels)


def _draw(results: Sequence[StudyResult], longest: float, axes: Axes) -> None:
    rows = range(len(results))
    values = [result.slowdown for result in results]
    colors = [
        light_color("series-1" if result.method.startswith("AntDT") else "series-0")
        for result in results
    ]
    axes.barh(rows, values, color=colors, height=0.62)
    for row, value in zip(rows, values, strict=True):
        axes.text(value + 0.012 * longest, row, f"{value:.2f}", va="center", fontsize=9)
    axes.set_yticks(rows, [result.method for result in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * longest)
    axes.axvline(1, color=light_color("muted"), linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("times a healthy cluster   (\N{LEFTWARDS ARROW} lower is better)")
