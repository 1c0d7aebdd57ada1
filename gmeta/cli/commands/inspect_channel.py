"""`gmeta inspect` on a channel: its versions, which one serves, and the judge's decisions."""

from typing import Any

from gmeta.cli.commands.console import make_console, make_table, print_result, show_table, size_text
from gmeta.errors import GMetaError
from gmeta.platform.files.local_paths import is_url
from gmeta.serving.channel.channel import Channel
from metaio.quantities import format_count

# Versions and verdicts that are shown: one screen.
_SHOWN = 20


def inspect_channel(
    place: str, channel: Channel, promotions: list[dict[str, Any]], verify: bool
) -> None:
    """Show the newest versions of a channel, their verdicts from its log, and which one serves."""
    console, current = make_console(), channel.current()
    numbers = channel.numbers()
    served = "nothing is served yet"
    if current is not None:
        served = f"serves version {current.parent.name}, {current.action} {current.at[:19]} UTC"
    held = format_count(len(numbers), "version")
    if is_url(place):
        # A channel at a URL comes as a copy of the version that serves and those that it builds on.
        held += f" of what it serves, copied to {channel.root}"
    console.print(f"channel {place}: {held}; {served}")
    heads = ("version", "kind", "over", "bytes", "of full", "rows", "promoted", "verdict")
    table = make_table("Versions", *heads, text=("version", "verdict"))
    verdicts = {
        entry.get("number"): entry for entry in promotions if entry.get("action") == "promoted"
    }
    broken = []
    for number in numbers[-_SHOWN:]:
        try:
            version, entry = channel.version(number), verdicts.get(number, {})
        except GMetaError as error:
            # The version that serves may be complete all the same.
            broken.append(str(error))
            continue
        touched = version.delta.touched.values() if version.delta else ()
        table.add_row(
            ("* " if current and current.number == number else "  ") + version.name,
            version.kind,
            str(version.delta.parent.number) if version.delta else "-",
            size_text(version.num_bytes),
            f"{version.num_bytes / max(version.full_bytes, 1):.1%}",
            f"{sum(one.rows for one in touched):,}" if version.delta else "all",
            str(entry.get("at", "never"))[:16].replace("T", " "),
            _format_scores(entry.get("verdict")),
        )
    show_table(console, table)
    for line in broken:
        console.print(f"damaged: {line}")
    for entry in [one for one in promotions if one.get("action") == "refused"][-_SHOWN:]:
        verdict = entry.get("verdict") or {}
        console.print(
            f"refused {str(entry.get('at'))[:19]}: {'; '.join(verdict.get('reasons', []))}"
        )
    print_result(
        kind="channel",
        path=place,
        versions=numbers,
        serves=None if current is None else current.number,
        decisions=promotions,
    )
    if current is None:
        return
    chain = channel.check_chain(current.number) if verify else channel.chain(current.number)
    how = "every checksum matches" if verify else "--verify reads it and checks checksums"
    num_bytes = size_text(chain.base.num_bytes + chain.delta_bytes)
    make_console().print(
        f"the chain of version {current.number} is complete: version {chain.base.number} and "
        f"{format_count(len(chain.deltas), 'delta')}, {num_bytes}; {how}"
    )


def _format_scores(verdict: Any) -> str:
    """Return a verdict's scores in a few words; "-" where there is no verdict."""
    if not isinstance(verdict, dict):
        return "-"
    scores = verdict.get("candidate") or {}
    scores_text = ", ".join(
        f"{name} {value:.4f}" for name, value in scores.items() if value is not None
    )
    difference = (verdict.get("difference") or {}).get("value")
    better = "" if difference is None else f", better by {difference:+.4g}"
    against = "refused, promoted by hand: " if verdict.get("verdict") == "refuse" else ""
    return f"{against}{scores_text}{better}" or "-"
