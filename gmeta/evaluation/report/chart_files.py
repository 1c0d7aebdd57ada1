"""Turns a chart into files: sheets as PNG, SVG and JSON, and small SVG panels for a page."""

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from gmeta.evaluation.report.evaluation_schema import Stage
from gmeta.platform.pages.palette import PALETTE

Axes: TypeAlias = Any  # of matplotlib, which is read without types

# As wide as a phone: the page puts panels side by side where there is room.
PANEL_WIDTH_INCHES = 4.8
PNG_DPI = 150
_NO_SVG_METADATA = {"Date": None, "Creator": None}


@dataclass(frozen=True)
class PlotSeries:
    """How a (run, stage) is drawn: the run has a colour and a marker, filled for one stage."""

    run: str
    stage: Stage
    label: str
    color_name: str
    marker: str

    @property
    def style(self) -> dict[str, Any]:
        """Return keyword arguments of Axes.errorbar and Line2D."""
        return {
            "color": light_color(self.color_name),
            "marker": self.marker,
            "markerfacecolor": light_color(self.color_name if self.stage == "after" else "page"),
            "markersize": 6,
            "markeredgewidth": 1.5,
        }


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title, what it shows in words (for screen readers), how to draw it."""

    title: str
    description: str
    draw: Callable[[Axes], None]
    height_inches: float = 3.2
    width_inches: float = PANEL_WIDTH_INCHES


@dataclass(frozen=True)
class Chart:
    """Panels that belong together under one heading, and the series that they share."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    series: Sequence[PlotSeries] = ()


def light_color(name: str) -> str:
    """Return a colour of the palette as it stands on white."""
    return PALETTE[name][0]


def render_sheet(chart: Chart) -> dict[str, bytes]:
    """Return all panels on white, at most three a row, with title and legend: png, svg and json.

    The json has what is drawn: points and bars, panel by panel."""
    # Four panels make two full rows.
    columns = 2 if len(chart.panels) == 4 else min(3, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    legend_columns = 2 * columns
    legend_inches = 0.25 * math.ceil(len(chart.series) / legend_columns)
    height_inches = rows * max(panel.height_inches for panel in chart.panels) + 0.5 + legend_inches
    with matplotlib.rc_context(_make_plot_settings(chart.name)):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
        size = PANEL_WIDTH_INCHES * columns, height_inches
        figure = Figure(size, PNG_DPI, facecolor=light_color("page"), layout=layout)
        figure.suptitle(chart.title, x=0.01, ha="left", fontweight="bold", fontsize=12)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, chart.panels, strict=False):
            panel.draw(axes)
            axes.set_title(panel.title, loc="left", fontsize=10)
        for axes in grid[len(chart.panels) :]:
            axes.set_axis_off()
        if chart.series:
            handles = [
                Line2D([], [], label=one.label, linestyle="none", **one.style)
                for one in chart.series
            ]
            figure.legend(
                handles=handles, loc="outside lower left", ncols=legend_columns, frameon=False
            )
        values = {"title": chart.title, "panels": [_list_values(axes) for axes in figure.axes]}
        text = json.dumps(values, indent=1, ensure_ascii=False, default=str) + "\n"
        return {
            "png": _write_canvas(FigureCanvasAgg(figure).print_png, {"Software": None}),
            "svg": _write_canvas(FigureCanvasSVG(figure).print_svg, _NO_SVG_METADATA),
            "json": text.encode(),
        }


def _list_values(axes: Axes) -> dict[str, Any]:
    """Return the points and bars of a panel, and the names of its axes."""
    containers = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
    ends = {id(line) for one in containers for line in one[1]}
    return {
        "panel": axes.get_title(loc="left"),
        "x": axes.get_xlabel(),
        "y": axes.get_ylabel(),
        "ticks": [one.get_text() for one in axes.get_xticklabels()],
        "points": [
            np.asarray(line.get_xydata()).tolist() for line in axes.lines if id(line) not in ends
        ],
        "bars": [[one.get_x(), one.get_width(), one.get_height()] for one in axes.patches],
        "intervals": [
            [segment.tolist() for segment in bars.get_segments()]
            for one in containers
            for bars in one[2]
        ],
    }


def render_svg(chart: Chart, index: int) -> str:
    """Return one panel as an <svg> element, without title, legend, size and colours of its own."""
    panel = chart.panels[index]
    prefix = f"{chart.name}-{index}"
    with matplotlib.rc_context(_make_plot_settings(prefix) | {"axes.facecolor": "none"}):
        # Without pyplot, which keeps every figure and may look for a display.
        size = panel.width_inches, panel.height_inches
        figure = Figure(size, facecolor="none", layout="constrained")
        panel.draw(figure.subplots())
        text = _write_canvas(FigureCanvasSVG(figure).print_svg, _NO_SVG_METADATA).decode()
    return _apply_theme(text[text.index("<svg") :].strip(), prefix, panel.description)


def _make_plot_settings(salt: str) -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        # Ids in the SVG are hashes: with a fixed salt the same picture has the same bytes.
        "svg.hashsalt": salt,
        # This font comes with matplotlib: a picture is the same everywhere.
        "font.family": "DejaVu Sans",
        "font.size": 10.5,
        # Names of runs and columns may have dollar signs.
        "text.parse_math": False,
        "text.color": light_color("ink"),
        "axes.labelcolor": light_color("muted"),
        "axes.edgecolor": light_color("line"),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": light_color("muted"),
        "ytick.color": light_color("muted"),
        "grid.color": light_color("line"),
        "grid.linewidth": 0.6,
    }


def _write_canvas(print_to: Callable[..., None], metadata: dict[str, None]) -> bytes:
    """Return what a canvas writes, without metadata."""
    # Not by Figure.savefig, which draws everything twice. Metadata would make two reports of one
    # evaluation differ.
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A PNG has boxes for what its font lacks; the page, in the browser's fonts, does not.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        print_to(buffer, metadata=metadata)
    return buffer.getvalue()


def _apply_theme(svg: str, prefix: str, description: str) -> str:
    """Replace colours and font by the page's, make ids unique, and remove the size."""
    # A drawing has no other colours, each in its light form: as CSS variables they serve light and
    # dark.
    for name, (color, _) in PALETTE.items():
        svg = svg.replace(color, f"var(--{name})")
    unneeded = r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>"
    svg = re.sub(unneeded, "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: 'DejaVu Sans'; ", "")
    # The page holds many drawings: equal ids would refer to the first of them.
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg role="img" aria-label="{escape(description)}" {box[0] if box else ""}>'
    return head + svg[svg.index(">") + 1 :]
