"""`gmeta inspect` on a stream: its increments, the growth of its tables, and what was refused."""

from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import typer

from gmeta.cli.commands.console import make_console, make_table, print_result, show_table
from gmeta.platform.files.local_paths import is_url
from metaio.errors import FormatError
from metaio.format.checked_json import has_shape
from metaio.format.inspection import find_damage
from metaio.prepare.schema.schema_file import parse_schema
from metaio.quantities import format_count
from metaio.stream.chain import IncrementRecord, Stream, format_event_time, open_stream
from metaio.stream.quarantine import list_quarantine
from metaio.stream.stream_state import load_state

# Increments, the newest: they fit on one screen, whatever the age of the stream.
_SHOWN = 12


def inspect_stream(path: str, verify: bool) -> None:
    """Show a stream's increments, tables and alarms, or with `verify` check its checksums."""
    stream, console = open_stream(path), make_console()
    if verify:
        problems = _find_problems(stream)
        for line in problems:
            console.print(line)
        print_result(kind="stream", path=path, problems=problems)
        if problems:
            raise typer.Exit(1)
        num = format_count(len(stream.records), "increment")
        console.print(f"{path} is intact: {num}, every checksum matches.")
        return
    records = stream.records
    # The quarantine is not published.
    refused = [] if is_url(path) else list_quarantine(Path(path))
    print_result(
        kind="stream",
        path=path,
        id=stream.id,
        increments=[
            {"number": one.number, "window": one.window, "report": one.report} for one in records
        ],
        quarantined=refused,
    )
    schema = parse_schema(stream.newest_recipe["schema"])
    gate = schema.stream.gate if schema.stream else 0.0
    labels = "label" if len(schema.labels) == 1 else "labels"
    console.print(
        f"stream {stream.id}: {format_count(len(records), 'increment')}, time in "
        f"{stream.description['time_unit']}, gate {gate:.0%}\n"
        f"task {schema.task.column}, {labels} {schema.label_text}"
    )
    console.print(_format_account(records, refused))
    for line in _describe_labels(records):
        console.print(line)
    _show_increments(records, stream.description["time_unit"])
    _show_tables(stream)
    if len(records) > _SHOWN:
        alarms = Counter(r.number for r in records[:-_SHOWN] for _ in r.report["alarms"])
        if alarms:
            console.print(f"{format_count(alarms.total(), 'alarm')} in increments before these")
    for record in records[-_SHOWN:]:
        for alarm in record.report["alarms"]:
            console.print(f"alarm in {record.number}: {alarm}")
    for note in sorted(refused, key=itemgetter("before")):
        # With its path: files of all partitions often have one name.
        first, *others = (file["name"] for file in note["files"])
        more = f" and {len(others):,} more" if others else ""
        reasons = "; ".join(note["reasons"])
        console.print(f"quarantined before {note['before']}: {first}{more}: {reasons}")


def _format_account(records: list[IncrementRecord], notes: list[dict[str, Any]]) -> str:
    """Return what became of every row that was read, and of files that are in no increment."""
    accounts = [one.report.get("account", {"read": 0}) for one in records]
    total = Counter[str]()
    for account in accounts:
        total.update(account if has_shape(account, {"": int}) else {})
    num_read = total.pop("read", 0)
    parts = [f"{count:,} {name.replace('_', ' ')}" for name, count in total.items() if count]
    lacking = num_read - total.total()
    found = f"{format_count(num_read, 'row')} read: {', '.join(parts)}; "
    found += f"{lacking:,} cannot be found" if lacking else "the sum closes"
    unknown = accounts.count({"read": 0})
    if unknown:
        found += f" (without {format_count(unknown, 'increment')} of an earlier release)"
    for fate in ("quarantined", "doubled", "waiting"):
        own = [note for note in notes if _fate_of(note) == fate]
        if own:
            rows = [note.get("rows") for note in own]
            found += f"\n{fate}: {format_count(sum(len(note['files']) for note in own), 'file')}, "
            found += format_count(sum(count or 0 for count in rows), "row")
            found += " and some that cannot be counted" if None in rows else ""
    return found


def _describe_labels(records: list[IncrementRecord]) -> list[str]:
    """Return a line on each label that matures."""
    total, waiting = Counter[tuple[str, str]](), Counter[str]()
    for record in records:
        of_splits = record.report.get("labels", {})
        of_splits = of_splits if has_shape(of_splits, {"": {"": {"": int}}}) else {}
        waiting.clear()  # what the newest says
        for label, counts in (one for own in of_splits.values() for one in own.items()):
            total.update({(label, what): count for what, count in counts.items()})
            waiting[label] += counts.get("waiting", 0)
    return [
        f"label {label}: ripe in {total[label, 'ripe']:,} rows, {count:,} wait; "
        f"{total[label, 'corrected']:,} corrected in time, {total[label, 'too_late']:,} too late "
        "to be learnt"
        for label, count in waiting.items()
    ]


def _fate_of(note: dict[str, Any]) -> str:
    kind = "doubled" if note.get("kind") == "doubled" else "quarantined"
    return "waiting" if note.get("with_next") else kind


def _find_problems(stream: Stream) -> list[str]:
    messages: list[str] = []
    for number in stream.numbers:
        try:
            known: list[str] = []
            messages += find_damage(stream.dataset(number, known), known_problems=known)
        # The manifest is damaged: those of other increments may be intact.
        except FormatError as error:
            messages.append(str(error))
    if not is_url(stream.url):
        try:
            load_state(Path(stream.url), stream.numbers[-1])
        except FormatError as error:
            messages.append(str(error))
    return messages


def _show_increments(records: list[IncrementRecord], unit: str) -> None:
    heads = ("no", "window to", "rows", "late", "tasks", "back", "new ids", "freed", "!")
    newest = records[-_SHOWN:]
    begin = format_event_time(newest[0].window[0], unit)
    title = f"Windows from {begin} on (back: returning tasks; !: alarms)"
    table = make_table(title, *heads, text=())
    for record in newest:
        report = record.report
        tables = report["tables"].values()
        back = sum(counts["returning"] for counts in report["tasks"].values())
        table.add_row(
            str(record.number),
            format_event_time(record.window[1], unit),
            _shorten_count(report["rows"]),
            _shorten_count(report["late"] + report["too_late"]),
            _shorten_count(back + sum(counts["new"] for counts in report["tasks"].values())),
            _shorten_count(back),
            _shorten_count(sum(table_counts["new"] for table_counts in tables)),
            _shorten_count(sum(own["freed"] for own in tables)),
            str(len(report["alarms"]) or ""),
        )
    show_table(make_console(), table)


def _show_tables(stream: Stream) -> None:
    tables = stream.newest.report["tables"]
    if not tables:
        return
    heads = ("table", "rows in use", "capacity", "full", "pending")
    table = make_table(f"Tables of increment {stream.newest.number}", *heads, text=("table",))
    for name, counts in tables.items():
        full = f"{100 * counts['rows'] / counts['capacity']:.0f} %"
        table.add_row(
            name, f"{counts['rows']:,}", f"{counts['capacity']:,}", full, f"{counts['pending']:,}"
        )
    show_table(make_console(), table)


def _shorten_count(number: int) -> str:
    """Return a count in at most six characters."""
    # Nine columns of a table fit into 80 characters.
    if number < 100_000:
        return f"{number:,}"
    return f"{number / 1e3:.0f} k" if number < 1e6 else f"{number / 1e6:.1f} M"
