"""Draws the increments of a stream, one panel a question."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import EngFormatter, MaxNLocator

from gmeta.evaluation.report.chart_files import PANEL_WIDTH_INCHES, Axes, Chart, Panel, light_color
from gmeta.evaluation.report.metric_lines import format_axis_label
from gmeta.metrics.catalogue import Scoring, label_of
from gmeta.metrics.metric_info import MetricInfo
from gmeta.pipeline.increment_outcome import Day

# How a line is drawn: its colour in the palette, its marker, its dashes.
Style = tuple[str, str, str]
_GOES_ON, _FROZEN, _BEST = ("series-0", "o", "-"), ("series-1", "s", "-"), ("muted", "", "--")
_BEFORE = ("series-2", "s", "-")
# Stages that are drawn as one: each by itself would be too thin to see.
_STAGES = {"prepare": ("prepare",), "train": ("train",), "deliver": ("export", "judge", "promote")}

Values = Sequence[float | None]  # of each increment
Line = tuple[str, Values, Style]


def stream_chart(days: Sequence[Day]) -> Chart:
    """Return the panels of a stream, the one to look at first; none without an increment."""
    if not days:
        return Chart("stream", "Stream", "", [])
    rows = [("rows", [day.record.num_rows for day in days])]
    ids = [("new", [day.new for day in days]), ("freed", [-day.freed for day in days])]
    seconds = [
        (name, [sum(day.took_s.get(stage, 0.0) for stage in stages) for day in days])
        for name, stages in _STAGES.items()
    ]
    forecasts = _forecast_panels(days)
    panels = [
        *forecasts[:1],
        *_gate_panels(days),
        *forecasts[1:],
        _bar_panel(days, "Training rows", "rows", rows),
        _bar_panel(days, "Ids that came (up) and went (down)", "ids", ids),
        _delivery_panel(days),
        _bar_panel(days, "Where the time goes", "seconds", seconds),
    ]
    return Chart("stream", "Stream", "", [panel for panel in panels if panel is not None])


def _forecast_panels(days: Sequence[Day]) -> list[Panel | None]:
    """Return the panels of forecasts: the model that goes on, the frozen one, the best possible."""
    panels: list[Panel | None] = []
    for info, name in _metric_infos(name for day in days for name in day.forecast):
        lines: list[Line] = [
            ("continued", [day.forecast.get(name) for day in days], _GOES_ON),
            ("frozen", [day.frozen.get(name) for day in days], _FROZEN),
        ]
        if name == "auc":
            lines.append(("best possible", [day.best_auc for day in days], _BEST))
        title = f"{info.label} before training on it (prequential)"
        panels.append(_line_panel(days, title, info, lines, is_hero=not panels))
    return panels


def _gate_panels(days: Sequence[Day]) -> list[Panel | None]:
    """Return the panels of what the judge compared; a refused candidate is crossed out."""
    panels = []
    for info, name in _metric_infos(
        name for day in days for name in day.verdict.get("candidate", {})
    ):
        candidates = _judged_values("candidate", name, days)
        pairs = zip(candidates, days, strict=True)
        refused = [value if day.refused else None for value, day in pairs]
        lines: list[Line] = [
            ("candidate", candidates, _GOES_ON),
            ("champion", _judged_values("champion", name, days), _BEFORE),
            ("refused", refused, ("series-3", "X", "")),
        ]
        panels.append(_line_panel(days, f"{info.label} of gate tasks", info, lines))
    return panels


def _delivery_panel(days: Sequence[Day]) -> Panel | None:
    known = [day for day in days if day.version is not None]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        for kind, color in (("delta", "series-0"), ("full", "series-1")):
            points = [
                (day.record.number, day.version.num_bytes)
                for day in known
                if day.version is not None and day.version.kind == kind
            ]
            if points:
                axes.bar(
                    *zip(*points, strict=True), color=light_color(color), width=0.7, label=kind
                )
        full_bytes = [day.version.full_bytes for day in known if day.version is not None]
        numbers = [day.record.number for day in known]
        style = {"color": light_color("muted"), "linestyle": "--", "label": "whole model"}
        axes.plot(numbers, full_bytes, linewidth=1.5, **style)
        _frame_axes(axes, days, "bytes")
        _add_legend(axes)
        axes.set_ylim(bottom=0)

    newest = known[-1].version
    summary = f"{newest.num_bytes:,} of {newest.full_bytes:,} at the newest" if newest else ""
    return Panel("Bytes shipped", f"Bytes shipped by increment: {summary}", draw)


def _bar_panel(
    days: Sequence[Day], title: str, unit: str, parts: Sequence[tuple[str, Values]]
) -> Panel | None:
    """Return a panel of stacked bars; negative values are stacked downwards."""
    numbers = [day.record.number for day in days]
    values = [
        (label, [value or 0 for value in numbers_of_part]) for label, numbers_of_part in parts
    ]
    if not any(any(heights) for _, heights in values):
        return None

    def draw(axes: Axes) -> None:
        base = [0.0] * len(days)
        for index, (label, heights) in enumerate(values):
            if any(heights):
                # Negative bars begin at 0: there is one kind of them, freed ids.
                bottom = [
                    at if height > 0 else 0.0 for at, height in zip(base, heights, strict=True)
                ]
                color = light_color(f"series-{index}")
                axes.bar(numbers, heights, bottom=bottom, color=color, width=0.7, label=label)
                base = [at + max(0.0, one) for at, one in zip(base, heights, strict=True)]
        axes.axhline(0, color=light_color("line"), linewidth=0.8)
        _frame_axes(axes, days, unit)
        if len(values) > 1:
            _add_legend(axes)

    summary = ", ".join(f"{label} {heights[-1]:,.4g}" for label, heights in values)
    return Panel(title, f"{title} by increment; at the newest: {summary}", draw)


def _line_panel(
    days: Sequence[Day], title: str, info: MetricInfo, lines: Sequence[Line], is_hero: bool = False
) -> Panel | None:
    """Return a panel of lines; a hero is wide, by date, with what became of each candidate."""
    drawn_lines = []
    numbers = [day.record.number for day in days]
    dates = _find_dates(days) if is_hero else []
    is_dated = bool(dates)
    places = dates or numbers
    for label, values, style in lines:
        pairs = zip(places, values, strict=True)
        known = [(place, value) for place, value in pairs if value is not None]
        if known:
            drawn_lines.append((label, known, style))
    if not drawn_lines:
        return None

    def draw(axes: Axes) -> None:
        for label, known, (color, marker, dashes) in drawn_lines:
            shape = {"marker": marker, "markersize": 5, "linestyle": dashes or "none"}
            shape |= {"color": light_color(color), "linewidth": 1.6, "label": label}
            axes.plot(*zip(*known, strict=True), **shape)
        _frame_axes(axes, days, format_axis_label(info), counts=False)
        if is_dated:
            _mark_decisions(axes, days, dates)
        _add_legend(axes)

    summary = ", ".join(f"{label} {known[-1][1]:.4f}" for label, known, _ in drawn_lines)
    description = f"{title}, by increment; at the newest: {summary}"
    return Panel(title, description, draw, width_inches=6.4 if is_hero else PANEL_WIDTH_INCHES)


def _find_dates(days: Sequence[Day]) -> list[datetime]:
    """Return the end of each increment's window; none where one is beyond all dates."""
    try:
        return [datetime.fromtimestamp(day.window_s[1], UTC) for day in days]
    except (OverflowError, OSError, ValueError):
        return []


def _mark_decisions(axes: Axes, days: Sequence[Day], dates: Sequence[Any]) -> None:
    """Mark below the lines when a version was promoted, and when a candidate was refused."""
    bottom, _ = axes.get_ylim()
    for label, refused, color, marker in (
        ("promoted", False, "series-2", "^"),
        ("refused", True, "bad", "X"),
    ):
        marked = [
            date
            for date, day in zip(dates, days, strict=True)
            if day.verdict and day.refused == refused
        ]
        if marked:
            style = {"linestyle": "none", "clip_on": False, "color": light_color(color)}
            axes.plot(marked, [bottom] * len(marked), marker=marker, label=label, **style)
    axes.set_ylim(bottom=bottom)
    axes.set_xlabel("end of the increment (UTC)")
    axes.xaxis.set_major_locator(locator := AutoDateLocator(maxticks=6))
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.set_xlim(auto=True)
    axes.margins(x=0.05)
    axes.autoscale(axis="x")


def _frame_axes(axes: Axes, days: Sequence[Day], label: str, counts: bool = True) -> None:
    """Name the axes and show all increments on the x axis."""
    axes.set_xlim(days[0].record.number - 0.6, days[-1].record.number + 0.6)
    axes.set_xlabel("increment")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if counts:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    # An offset of the axis would stand where the legend does.
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(axis="y")
    axes.margins(y=0.1)


def _add_legend(axes: Axes) -> None:
    # The legend stands above the axes: inside it would cover data.
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
    axes.legend(frameon=False, fontsize=9, ncols=3, columnspacing=1.2, handlelength=1.5, **place)


def _metric_infos(names: Iterable[str]) -> list[tuple[MetricInfo, str]]:
    known = {name: label_of(name) for name in names}
    # A label with an RMSE is a rating, and its metrics read so.
    rated = {label for own, label in known.values() if own == "rmse"}
    infos = []
    for name, (metric_info, label) in known.items():
        if metric_info != "gauc":
            info = Scoring("mse" if label in rated else "bce").info(metric_info)
            if label:
                info = replace(info, label=f"{info.label} of {label}")
            infos.append((info, name))
    return infos


def _judged_values(who: str, name: str, days: Sequence[Day]) -> list[float | None]:
    values = ((day.verdict.get(who) or {}).get(name) for day in days)
    return [None if value is None else float(value) for value in values]
