"""docs/results.md, made of what benchmarks/quality.py measured."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _quality_protocols import FIRST_TRY, PROTOCOLS, WITH_EVENTS, Protocol
from _quality_tables import Row, counts, markdown

TEMPLATE = Path(__file__).with_name("_results_page.md")
COUNTED = ("plain", "plain, fine-tuned", "bias model", "boosted trees")


@dataclass(frozen=True)
class Measured:
    """What was measured of a data set: in how many seconds, with how many seeds, and where."""

    protocol: Protocol
    rows: tuple[Row, ...]
    seconds: float
    seeds: int
    where: str


def page(measured: Sequence[Measured], draws: int, command: str, before: str = "") -> str:
    """The whole page as Markdown; data sets that were not measured stand as in the page before."""
    parts = _parts(before)
    for one in measured:
        parts[one.protocol.title] = _summary(one), _section(one, draws)
    shown, of_events = (
        [parts[protocol.title] for protocol in protocols if protocol.title in parts]
        for protocols in ((*PROTOCOLS, *FIRST_TRY), WITH_EVENTS)
    )
    return TEMPLATE.read_text().format(
        budget="\n".join(map(_budget, PROTOCOLS)),
        command=command,
        summary="\n".join(summary for summary, _ in shown),
        sections="\n".join(section for _, section in shown),
        events="\n".join(summary for summary, _ in of_events),
        event_sections="\n".join(section for _, section in of_events),
    )


def _parts(text: str) -> dict[str, tuple[str, str]]:
    """Of each data set of a page its row of the counts and its section."""
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", text, flags=re.M)}
    rows = re.finditer(r"^\| \[(.+)\]\(#.+$", text, flags=re.M)
    return {row[1]: (row[0], f"## {sections[row[1]].rstrip()}\n") for row in rows}


def _summary(one: Measured) -> str:
    cells = []
    for head in COUNTED:
        told = counts(one.rows, head)
        cells += [
            str(told[verdict]) if any(told.values()) else "-" for verdict in ("better", "worse")
        ]
    title = one.protocol.title
    name = f"[{title}](#{_anchor(title)})"
    return f"| {name} | {one.where} | {len(one.rows)} | {' | '.join(cells)} |"


def _budget(protocol: Protocol) -> str:
    cells = *protocol.tuned, *protocol.by_hand, protocol.judged_by
    return f"| {protocol.title} | {' | '.join(map(str, cells))} |"


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in "-_ ")
    return kept.strip().replace(" ", "-")


def _section(one: Measured, draws: int) -> str:
    protocol = one.protocol
    told = f"Means over {one.seeds} seeds" if one.seeds > 1 else "One seed"
    if not protocol.draws:
        told += " of the one draw that the protocol gives"
    elif draws > 1:
        told += f" and {draws} draws of support and query rows"
    if protocol.log:
        told += "."
    else:
        told += f". Configs: `examples/{protocol.config}` and `examples/plain/{protocol.config}`."
    ahead = all(lead.verdict == "better" for row in one.rows for lead in row.leads)
    lines = [
        f"## {protocol.title}",
        f"{protocol.about} {told}",
        "\n".join(markdown(one.rows)),
        "Ahead of every baseline in every row."
        if ahead
        else f"Why adapting is not ahead everywhere: {protocol.why}",
    ]
    return "\n\n".join(lines) + "\n"
