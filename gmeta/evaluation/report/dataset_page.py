"""Draws a prepared dataset as one HTML page: sizes of tasks, ids in use, ids that are unknown."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from gmeta.evaluation.report.chart_files import Axes, Chart, Panel, light_color
from gmeta.evaluation.report.html_page import draw_panels
from gmeta.platform.pages.templates import load_template
from metaio.format.dataset import Dataset
from metaio.format.inspection import EventUsage, SplitSummary
from metaio.quantities import format_count

NUM_BARS = 40
# More rows than that in a task are counted in the last bar: a few tasks would press all others.
SHOWN_SHARE = 0.99
# Tables with most rows; more bars could not be named.
MAX_TABLES = 12
# From there on a split scores mostly unknown ids.
MANY_UNKNOWN = 0.5


def render_dataset(dataset: Dataset, summaries: Sequence[SplitSummary]) -> str:
    """Return the page of a dataset."""
    tiles = [
        (
            f"{len(one.support_T):,}",
            f"episodes of {one.name}",
            f"{one.num_rows:,} rows; labels' mean {', '.join(f'{u.mean:.3g}' for u in one.labels)}",
            "",
        )
        for one in summaries
    ]
    # What [episodes] longer and the other rules cut; a synthetic dataset reports nothing.
    for name, count in dataset.manifest.report.get("dropped", {}).items():
        if count:
            tiles.append((f"{count:,}", name.replace("_", " "), "left out by gmeta prepare", ""))
    sizes = [
        Panel(
            one.name,
            f"Episodes of {one.name} by their rows",
            partial(_draw_sizes, one.support_T + one.query_T, one.support_T),
        )
        for one in summaries
        if len(one.support_T)
    ]
    charts = [
        Chart("sizes", "Rows of an episode", "Pale: support and query; strong: support.", sizes),
        Chart(
            "events",
            "Events that a row knows",
            "Where the line stands, older events than the newest are left out (longest).",
            [
                Panel(
                    one.name,
                    f"Rows of {one.name} by the events that they know",
                    partial(_draw_events, one.events),
                )
                for one in summaries
                if one.events is not None and len(one.events.known_N)
            ],
        ),
        Chart(
            "ids",
            "Ids",
            "In use in the first split; and of each split, the share of uses of ids that the "
            "training rows do not have.",
            _make_id_panels(summaries),
        ),
    ]
    return load_template("gmeta.evaluation.report", "dataset.html").render(
        name=dataset.url,
        task=dataset.task,
        label=dataset.label,
        verdict=_judge(summaries),
        tiles=tiles,
        charts=[draw_panels(chart) for chart in charts if chart.panels],
    )


def _judge(summaries: Sequence[SplitSummary]) -> tuple[str, str]:
    """Return the first thing to know, and whether it is a warning."""
    first, *others = summaries
    found = [(table, one.name) for one in others for table in one.tables]
    if found:
        table, split = max(found, key=lambda pair: pair[0].unknown_share)
        if table.unknown_share > MANY_UNKNOWN:
            return (
                f"{table.unknown_share:.0%} of the uses of {table.name} in {split} are of ids "
                "that the training rows do not have: a model can say nothing of them.",
                "warn",
            )
    support = float(np.median(first.support_T)) if len(first.support_T) else 0.0
    return (
        f"{format_count(len(first.support_T), 'episode')} to train on, with {support:g} support "
        f"rows in the median, and {format_count(len(others), 'split')} to score.",
        "",
    )


def _make_id_panels(summaries: Sequence[SplitSummary]) -> list[Panel]:
    tables = sorted(summaries[0].tables, key=lambda one: -one.num_rows)[:MAX_TABLES]
    if not tables:
        return []
    names = [table.name for table in tables]
    height = 1.0 + 0.3 * len(names)
    used = [table.num_used for table in tables]
    panels = [
        Panel("Ids in use", "Ids in use of each table", partial(_draw_bars, names, used), height)
    ]
    for one in summaries[1:]:
        shares = {table.name: table.unknown_share for table in one.tables}
        values = [shares.get(name, 0.0) for name in names]
        draw = partial(_draw_bars, names, values, is_share=True)
        text = f"Share of unknown ids of each table in {one.name}"
        panels.append(Panel(f"Unknown in {one.name}", text, draw, height))
    return panels


def _draw_sizes(rows_T: np.ndarray, support_T: np.ndarray, axes: Axes) -> None:
    longest = max(1, int(np.quantile(rows_T, SHOWN_SHARE)))
    # Bars of equally many sizes: of unequal ones the wider would stand out for nothing.
    width = -(-(longest + 1) // NUM_BARS)
    edges = np.arange(0, longest + 1 + width, width)
    for values_T, alpha in ((rows_T, 0.35), (support_T, 1.0)):
        shown_T = np.minimum(values_T, longest)
        axes.hist(shown_T, edges.tolist(), color=light_color("series-0"), alpha=alpha)
    axes.set(xlabel="rows", ylabel="episodes")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y")


def _draw_events(events: EventUsage, axes: Axes) -> None:
    longest = max(1, int(np.quantile(events.known_N, SHOWN_SHARE)), events.longest)
    width = -(-(longest + 1) // NUM_BARS)
    edges = np.arange(0, longest + 1 + width, width)
    shown_N = np.minimum(events.known_N, longest)
    axes.hist(shown_N, edges.tolist(), color=light_color("series-0"))
    if events.longest:
        axes.axvline(events.longest, color=light_color("series-1"))
    axes.set(xlabel="events", ylabel="rows")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y")


def _draw_bars(
    names: Sequence[str], values: Sequence[float], axes: Axes, is_share: bool = False
) -> None:
    color = light_color("series-1" if is_share else "series-0")
    axes.barh(range(len(names)), values, color=color, height=0.7)
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    if is_share:
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.set_xscale("symlog")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="x")
