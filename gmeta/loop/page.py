"""The picture of a stream: increments, new and freed ids, scores, verdicts, versions and sizes, as
one HTML page that asks nothing of the network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gmeta.delivery.versions import Version
from gmeta.loop.loop import Loop
from gmeta.report.render import PALETTE, Axes, Chart, Panel, light, svg_panel
from metaio.stream.chain import IncrementRecord, increment_numbers, open_stream

_SHOWN = 200  # of the newest increments: more are no picture


@dataclass(frozen=True)
class Day:
    """One increment with what came of it."""

    record: IncrementRecord
    verdict: dict[str, Any]
    version: Version | None

    @property
    def new(self) -> int:
        """Count the ids that got a row."""
        return sum(table["new"] for table in self.record.report["tables"].values())

    @property
    def freed(self) -> int:
        """Count the ids that lost theirs."""
        return sum(table["freed"] for table in self.record.report["tables"].values())

    @property
    def told(self) -> str:
        """Return what was decided, and why if it was refused."""
        if not self.verdict:
            return "not judged yet"
        reasons = "; ".join(self.verdict.get("reasons", []))
        return f"refused: {reasons}" if self.verdict["verdict"] == "refuse" else "promoted"


def stream_page(loop: Loop) -> str:
    """Return the page of a loop's stream; of one without increments it says so."""
    days = _days(loop)
    current = loop.channel.current()
    environment = Environment(
        loader=PackageLoader("gmeta.loop", "."), autoescape=True, undefined=StrictUndefined
    )
    drawn = [
        # Drawn here: not to be escaped.
        (panel, Markup(svg_panel(chart, index)))
        for chart in _charts(days)
        for index, panel in enumerate(chart.panels)
    ]
    return environment.get_template("stream.html").render(
        days=list(reversed(days)),
        panels=drawn,
        stream=loop.config.follow.stream,
        channel=str(loop.channel.root),
        current=current,
        quarantined=loop.quarantined(),
        palette=PALETTE,
    )


def _days(loop: Loop) -> list[Day]:
    stream_url = loop.config.follow.stream
    numbers = increment_numbers(stream_url)
    if not numbers:
        return []
    stream, found, versions = open_stream(stream_url), [], set(loop.channel.numbers())
    for number in numbers[-_SHOWN:]:
        promoted = loop.promoted(number)
        # Of one that was removed since, the log still tells the verdict.
        version = loop.channel.version(promoted) if promoted and promoted in versions else None
        found.append(Day(stream.record(number), loop.verdict(number) or {}, version))
    return found


def _charts(days: Sequence[Day]) -> list[Chart]:
    if not days:
        return []
    metrics = list(dict.fromkeys(name for day in days for name in day.verdict.get("candidate", {})))
    panels = [
        _panel(days, "Rows of training", {"rows": lambda day: day.record.num_rows}),
        _panel(days, "Ids", {"new": lambda day: day.new, "freed": lambda day: day.freed}),
        *(
            _panel(
                days,
                f"Gate tasks: {name}",
                {
                    "trained on the increment": partial(_score, "candidate", name),
                    "the model before": partial(_score, "champion", name),
                },
            )
            for name in metrics
        ),
        _panel(
            days,
            "Bytes shipped, share of the full model",
            {
                "share": lambda day: (
                    day.version.num_bytes / day.version.full_bytes if day.version else None
                )
            },
        ),
    ]
    return [Chart("stream", "Stream", "", panels)]


def _score(who: str, name: str, day: Day) -> float | None:
    """Return a score of the candidate, or of the champion on the same rows."""
    found = (day.verdict.get(who) or {}).get(name)
    return None if found is None else float(found)


Value = Callable[[Day], float | None]


def _panel(days: Sequence[Day], title: str, lines: dict[str, Value]) -> Panel:
    return Panel(title, f"{title} by increment: {', '.join(lines)}", partial(_draw, days, lines))


def _draw(days: Sequence[Day], lines: dict[str, Value], axes: Axes) -> None:
    for index, (label, value) in enumerate(lines.items()):
        known = [(day.record.number, found) for day in days if (found := value(day)) is not None]
        if known:
            numbers, values = zip(*known, strict=True)
            color = light(f"series-{index}")
            axes.plot(numbers, values, color=color, marker="os"[index], markersize=4, label=label)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=9)
    axes.set_xlabel("increment")
    axes.grid(axis="y")
    axes.margins(y=0.15)
