"""`gmeta prepare --extend`: appends the next increment to a stream and prints what is in it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gmeta.cli.commands.console import make_console, print_result, show_phases
from gmeta.cli.commands.prepare_spark import refuse_transform, spark_session
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import load_schema
from metaio.quantities import format_count
from metaio.stream.chain import IncrementRecord, format_event_time, open_stream
from metaio.stream.extend import extend
from metaio.stream.quarantine import RefusedFilesError
from metaio.stream.spark_engine import make_spark_engine


def extend_stream(
    inputs: list[str],
    along: list[str],
    stream: str,
    schema: Path | None,
    options: PrepareOptions,
    screening: dict[str, Any],
    spark: bool,
) -> None:
    """Append an increment and print it. Raises QuarantinedError: the screen refuses its rows."""
    known = load_schema(schema) if schema is not None else None
    left_out: list[RefusedFilesError] = []
    # The files of --along that the screen refuses are left out: they must not hold up the others.
    append: Callable[..., IncrementRecord] = partial(
        extend, along=along, left_out=left_out.append, **screening
    )
    if spark:
        if schema is not None and known is not None:
            refuse_transform(schema, known)
        with spark_session([*inputs, *along], stream) as session:
            engine = make_spark_engine(session)
            record = append(inputs, stream, known, options, engine_of=engine)
    else:
        with show_phases() as report_phase:
            record = append(inputs, stream, known, options, progress=report_phase)
    for refusal in left_out:
        notice = f"left out: {refusal.names}: {'; '.join(refusal.reasons)}"
        make_console(stderr=True).print(notice)
    _print_increment(stream, record)
    print_result(
        stream=stream,
        increment=record.number,
        window=record.window,
        fingerprint=record.fingerprint,
        report=record.report,
    )


def _print_increment(stream: str, record: IncrementRecord) -> None:
    console, report = make_console(stderr=True), record.report
    unit = open_stream(stream).description["time_unit"]
    begin, end = (format_event_time(ticks, unit) for ticks in record.window)
    tasks = {name: sum(counts.values()) for name, counts in report["tasks"].items()}
    returning = sum(counts["returning"] for counts in report["tasks"].values())
    console.print(
        f"increment {record.number}: {format_count(report['rows'], 'row')} of "
        f"{format_count(sum(tasks.values()), 'task')}, {returning:,} of them returning; window "
        f"from {begin} to {end}, fingerprint {record.fingerprint[:16]}"
    )
    if report["late"] or report["too_late"]:
        console.print(f"late: {report['late']:,} taken as support, {report['too_late']:,} dropped")
    if bad := report["account"]["bad_lines"]:
        what = f"{format_count(bad, 'line')} that cannot be read"
        console.print(f"left out: {what} (bad_lines.jsonl in the increment's folder)")
    for name, table in report["tables"].items():
        if not (table["new"] or table["freed"]):
            continue
        freed = f", {table['freed']:,} freed" if table["freed"] else ""
        pending = f", {table['pending']:,} waiting for admission" if table["pending"] else ""
        console.print(
            f"table {name}: {format_count(table['new'], 'new id')}{freed}, {table['rows']:,} of "
            f"{table['capacity']:,} rows in use{pending}"
        )
    if report["new_columns"]:
        console.print(f"columns that nobody reads: {', '.join(report['new_columns'])}")
    for alarm in report["alarms"]:
        console.print(f"alarm: {alarm}")
    console.print(f"extended: {stream}  (look inside: gmeta inspect {stream})")
