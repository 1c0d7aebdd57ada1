"""docs/results.md, made of what benchmarks/quality.py measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _quality_protocols import Protocol
from _quality_tables import Row, counts, markdown, not_ahead


@dataclass(frozen=True)
class Measured:
    """What was measured of a data set, and in how many seconds."""

    protocol: Protocol
    rows: tuple[Row, ...]
    seconds: float
    evaluations: tuple[Path, ...]


TEMPLATE = Path(__file__).with_name("_results_page.md")


def page(
    measured: Sequence[Measured],
    draws: int,
    command: str,
    where: Mapping[str, Any],
) -> str:
    """The whole page as Markdown."""
    minutes = sum(one.seconds for one in measured) / 60
    drawn = any(one.protocol.draws for one in measured) and draws > 1
    return TEMPLATE.read_text().format(
        draws_told="of the support and query rows where they can be drawn anew, " if drawn else "",
        budget="\n".join(map(_budget, measured)),
        command=command,
        minutes=max(minutes, 1),
        cores=where["cores"],
        processor=where["processor"],
        load=where["load_1min"],
        torch=where["torch"],
        date=where["date"],
        summary="\n".join(map(_summary, measured)),
        sections="\n".join(line for one in measured for line in _section(one, draws)),
    )


def _summary(one: Measured) -> str:
    cells = []
    for head in ("plain", "plain, fine-tuned", "bias model", "boosted trees"):
        told = counts(one.rows, head)
        cells += [
            str(told[verdict]) if any(told.values()) else "-" for verdict in ("better", "worse")
        ]
    anchor = _anchor(one.protocol.title)
    name = f"[{one.protocol.title}](#{anchor})"
    return f"| {name} | {one.seconds / 60:.1f} | {len(one.rows)} | {' | '.join(cells)} |"


def _budget(one: Measured) -> str:
    cells = *one.protocol.tuned, *one.protocol.by_hand, one.protocol.judged_by
    return f"| {one.protocol.title} | {' | '.join(map(str, cells))} |"


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in "-_ ")
    return kept.strip().replace(" ", "-")


def _section(one: Measured, draws: int) -> list[str]:
    protocol = one.protocol
    seeds = len(one.evaluations)
    told = [f"Means over {seeds} seeds" if seeds > 1 else "One seed"]
    if protocol.draws and draws > 1:
        told += [f"and {draws} draws of support and query rows"]
    elif not protocol.draws:
        told += ["of the one draw that the protocol gives"]
    lines = [f"## {protocol.title}", "", f"{protocol.about} {' '.join(told)}.", ""]
    lines += [*markdown(one.rows), ""]
    config = protocol.configs["adapted"].name
    lines += [f"Configs: `examples/{config}`, `examples/plain/{config}`.", ""]
    behind = not_ahead(one.rows)
    if behind:
        lines += [
            "Not ahead:",
            "",
            *(f"- {line}" for line in behind),
            "",
            f"Why: {protocol.why}",
            "",
        ]
    else:
        lines += ["Ahead of every baseline in every row.", ""]
    return lines
