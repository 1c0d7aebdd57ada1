"""Draws what `gmeta inspect` counts: sizes of support and query sets, and the skew of ids."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metaio.errors import DataError
from metaio.format.inspection import SplitSummary
from metaio.quantities import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Tables drawn: the largest say most about skew, and more lines cannot be distinguished.
_MAX_CURVES = 8
_MAX_MARKED = 12  # ids of a curve that is drawn with its points


def draw_summaries(summaries: list[SplitSummary], path: Path) -> bytes:
    """Return a picture of the kind that `path` names (default PNG), with one row for each split."""
    # Imported here: it takes half a second, and most inspections draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.6 * max(len(summaries), 1)), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in ("", *kinds):
        raise DataError(f"picture {path} is of no known kind: {', '.join(kinds)}. Name it .png")
    axes = figure.subplots(max(len(summaries), 1), 2, squeeze=False)
    tables = _choose_largest_tables(summaries)
    # Sizes of support and query on the left, cumulative use of ids on the right.
    for (sizes, skew), summary in zip(axes, summaries, strict=False):
        _draw_sizes(sizes, summary)
        _draw_skew(skew, summary, tables)
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=path.suffix[1:].lower() or "png")
    return content.getvalue()


def _draw_sizes(axes: Axes, summary: SplitSummary) -> None:
    largest = int(max(summary.support_T.max(initial=0), summary.query_T.max(initial=0), 1))
    # Integer bounds: bars between two sizes would stay empty.
    bins = np.unique(np.linspace(0, largest + 1, 41).round())
    axes.hist(summary.support_T, bins.tolist(), alpha=0.7, label="support")
    axes.hist(summary.query_T, bins.tolist(), alpha=0.7, label="query")
    axes.set(
        title=f"{summary.name}: {format_count(len(summary.support_T), 'episode')}",
        xlabel="rows",
        ylabel="episodes",
    )
    axes.legend()


def _choose_largest_tables(summaries: list[SplitSummary]) -> list[str]:
    """Return the tables to draw: those with most ids in use in any split first."""
    most_used: dict[str, int] = {}
    for summary in summaries:
        for use in summary.tables:
            most_used[use.name] = max(use.num_used, most_used.get(use.name, 0))
    # A curve of a single id is a point.
    names = [name for name, num_used in most_used.items() if num_used > 1]
    return sorted(names, key=lambda name: -most_used[name])[:_MAX_CURVES]


def _draw_skew(axes: Axes, summary: SplitSummary, tables: list[str]) -> None:
    used = {use.name: use for use in summary.tables if use.num_used > 1}
    for color, name in enumerate(tables):
        if name not in used:
            continue
        uses_R = used[name].uses_R
        falling = np.sort(uses_R[uses_R > 0])[::-1]
        share = np.concatenate([[0.0], np.cumsum(falling) / falling.sum()])
        axes.plot(
            100 * np.arange(len(share)) / len(falling),
            100 * share,
            color=f"C{color}",  # a table has one colour in all splits
            marker="." if len(falling) <= _MAX_MARKED else "",
            label=name,
        )
    axes.set(
        title="share of uses carried by the most used ids",
        xlabel="% of ids in use",
        ylabel="% of uses",
    )
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small", ncols=2)
