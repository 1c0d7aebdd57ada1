"""Draws a stream as one HTML page that loads nothing from the network."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from gmeta.evaluation.report.chart_files import render_svg
from gmeta.pipeline.increment_outcome import Day
from gmeta.pipeline.outcome_reader import read_days
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.pipeline_status import PipelineStatus
from gmeta.pipeline.stage_outcome import RunningStage
from gmeta.pipeline.stream_charts import stream_chart
from gmeta.platform.pages.templates import load_template
from metaio.quantities import format_duration

# matplotlib's settings belong to the process, and pages are drawn in threads.
_DRAWING = threading.Lock()
# Changes of the current version that are listed, the newest.
_SHOWN = 100


@dataclass(frozen=True)
class StreamPicture:
    """The part of the page that only a stage changes, and that takes a second to draw."""

    stream: str
    channel: str
    days: Sequence[Day]
    panels: Sequence[tuple[str, Markup]]  # title and drawing
    moves: Sequence[Mapping[str, Any]]  # of the channel's pointer, and refusals; newest first


def draw_stream(pipeline: Pipeline) -> StreamPicture:
    """Return the picture of a loop's stream."""
    days = read_days(pipeline)
    chart = stream_chart(days)
    with _DRAWING:
        # Markup: drawn here, so it needs no escaping.
        panels = [
            (panel.title, Markup(render_svg(chart, index)))
            for index, panel in enumerate(chart.panels)
        ]
    return StreamPicture(
        stream=pipeline.config.follow.stream,
        channel=str(pipeline.channel.root),
        days=days,
        panels=panels,
        # The newest first.
        moves=pipeline.channel.promotions()[: -_SHOWN - 1 : -1],
    )


def render_page(
    picture: StreamPicture,
    status: PipelineStatus,
    under_way: RunningStage | None = None,
    refresh_s: int = 0,
) -> str:
    """Return the page of the stream's state; it reloads itself after `refresh_s` (0: never)."""
    return _template().render(
        picture=picture,
        verdict=_judge_stream(status, picture.days),
        tiles=_list_tiles(status, under_way),
        alarms=status.alarms(),
        quarantined=status.refused_files,
        written=_format_time(datetime.now(UTC).timestamp()),
        refresh_s=refresh_s,
        told_time=_format_time,
        duration=format_duration,
    )


def render_stream(pipeline: Pipeline, status: PipelineStatus) -> str:
    """Return the page of a loop's stream; of one without increments it says so."""
    return render_page(draw_stream(pipeline), status)


def _judge_stream(status: PipelineStatus, days: Sequence[Day]) -> tuple[str, str]:
    """Return how the stream is in a sentence, and whether that is good or bad."""
    alarms = status.alarms()
    if alarms:
        return f"Look at this: {alarms[0]}", "bad"
    event_age_s = status.event_age_s()
    if status.current is None or event_age_s is None:
        return "Nothing is served yet.", ""
    sentence = f"All is well: version {status.current.number} serves, and knows events up to "
    sentence += f"{format_duration(event_age_s)} ago."
    last = days[-1] if days else None
    if last and "auc" in last.forecast and "auc" in last.frozen:
        sentence += f" AUC of the newest increment: {last.forecast['auc']:.4f}"
        sentence += f", {last.frozen['auc']:.4f} of the first version."
    return sentence, "good"


def _list_tiles(
    status: PipelineStatus, under_way: RunningStage | None
) -> list[tuple[str, str, str, str]]:
    """Return value, name, detail and kind of each tile."""
    event_age_s, served_age_s = status.event_age_s(), status.served_age_s()
    served = "none yet" if status.current is None else str(status.current.number)
    of_increments = f"increment {status.served_increment or '-'} of {status.prepared or '-'}"
    promoted = "-" if served_age_s is None else f"{format_duration(served_age_s)} ago"
    known = "-" if event_age_s is None else f"{format_duration(event_age_s)} ago"
    tiles = [
        (served, "served version", of_increments, ""),
        (promoted, "promoted", "", ""),
        (known, "knows events up to", "", ""),
        (f"{status.waiting:,}", "partitions waiting", "", "warn" if status.waiting else ""),
    ]
    if status.held:
        tiles.append((f"{status.held:,}", "files held", "for the next increment", ""))
    if under_way is not None:
        what = f" of increment {under_way.increment}" if under_way.increment else ""
        since = format_duration(time.monotonic() - under_way.since_s)
        tiles.append((since, "under way", f"{under_way.stage}{what}", ""))
    return tiles


def _format_time(seconds: float) -> str:
    """Return seconds since 1970 as a time that sorts, and a number that is no date as it is."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return f"{seconds:,.0f} s"


@cache
def _template() -> Template:
    return load_template("gmeta.pipeline", "stream.html")
