"""Writes the next increment of a stream, its report, and the state behind it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from metaio.format.checked_json import write_checked_json
from metaio.format.layout import RESET_FOLDER
from metaio.format.manifest import StreamPlace, canonical_json
from metaio.prepare.episodes.encode import FittedEncoding
from metaio.prepare.episodes.ordered_map import Progress
from metaio.prepare.episodes.survey import Survey
from metaio.prepare.job import Job, PrepareOptions, make_job
from metaio.prepare.schema.rules import GATE
from metaio.prepare.source.bad_lines import write_bad_lines
from metaio.prepare.source.source import DuckSource
from metaio.prepare.source.transform import describe_transform
from metaio.stream.chain import (
    FIRST_INCREMENT,
    INCREMENTS,
    STREAM_FILE,
    STREAM_FORMAT,
    name_increment_folder,
)
from metaio.stream.description import OpenedStream
from metaio.stream.engine import Engine, WindowJob
from metaio.stream.label_windows import LabelWindows, nest
from metaio.stream.numbering import Numbering, TableChange, choose_capacity
from metaio.stream.quarantine import refuse_files
from metaio.stream.row_growth import RowGrowth
from metaio.stream.stream_state import StreamState, commit_state, open_new_state, write_tables
from metaio.stream.taken_files import InputFile, OfferedFiles, append_inputs
from metaio.stream.window import SummaryContext, WindowSummary, find_stream_rule, find_time_unit
from metaio.stream.window_checks import find_alarms, measure_drift, summarise_window
from metaio.stream.window_events import WindowEvents


@dataclass(frozen=True)
class NextIncrement:
    """The increment that is being made: what it is made of, and what was found out about it."""

    before: OpenedStream
    summary: WindowSummary
    context: SummaryContext
    files: OfferedFiles
    events: WindowEvents
    filled: dict[str, int]  # rows of files that lack a column
    tables: dict[str, Numbering]
    changes: dict[str, TableChange]
    moments: dict[str, tuple[float, float]]

    @property
    def recorded(self) -> list[InputFile]:
        """Return what the increment lists as inputs."""
        return self.files.recorded + self.events.files

    @property
    def window(self) -> tuple[int, int]:
        """Return the span of event time; it begins where the one before ended."""
        clock = self.context.screen.clock
        start = self.summary.least_time
        if clock.start is not None and not clock.is_backfill:
            start = clock.start
        return start, self.summary.most_time + 1


def write_increment(
    found: NextIncrement,
    engine: Engine,
    source: DuckSource,
    types: dict[str, pa.DataType],
    options: PrepareOptions,
    report_progress: Progress,
) -> None:
    """Write the increment and the state behind it; both exist once this returns."""
    before, number, root = found.before, found.before.number, found.before.root
    schema = before.schema
    job = _make_job(found, options, types)
    freed = {table: change.freed for table, change in found.changes.items()}
    screen = found.context.screen
    labels = {
        name: LabelWindows.of(schema, screen.clock, before.state, found.window, name != GATE)
        for name in found.context.splits.names
    }
    num_rows, growth = found.summary.num_rows, None
    if before.stored != schema:
        growth = RowGrowth(before.stored, schema, found.moments)
    window = WindowJob(
        job, screen, freed, before.state.folder, num_rows, labels, found.window[1], growth
    )
    # In this order: a state counts once its increment exists, a description once there is one.
    with job.open(str(root / INCREMENTS / name_increment_folder(number))) as writer:
        description = before.description or _make_description(found, job, source.columns, types)
        with open_new_state(root, number) as partial:
            write_tables(partial, found.tables)
            with refuse_files(found.files.given):
                written = engine.write(
                    window, found.tables, found.events, writer, partial, report_progress
                )
            job.write_vocabularies(writer.folder)
            write_bad_lines(writer.folder, source.bad_lines)
            _write_resets(writer.folder, found.changes)
            new_columns = sorted({*source.columns} - {*description["columns"], *schema.columns})
            num_late = written.rows.get("late", found.summary.num_late)
            report = _make_report(found, job, num_late)
            report |= {"tasks": written.tasks, "new_columns": new_columns}
            if joined := [name for name in schema.inputs if name not in before.stored.inputs]:
                report["joined_columns"] = joined
            if labels[GATE].matures:
                report["labels"] = {name: nest(own) for name, own in written.labels.items()}
            account, num_bad = report["account"], len(source.bad_lines)
            account |= {**written.rows, "bad_lines": num_bad, "read": account["read"] + num_bad}
            # Only what there was, as prepare has it.
            lost = written.dropped.report()
            lost |= {name: count for name, count in source.left_out.items() if count}
            hashed = written.use.report()
            writer.report = {"dropped": lost, "hashed_tables": hashed, "stream": report}
            writer.report |= describe_transform(schema.transform)
            freed_rows = {table: change.num_freed for table, change in found.changes.items()}
            stream = description["stream"]
            writer.stream = StreamPlace(stream, number, before.parent, found.window, freed_rows)
            windows = [*before.state.windows, summarise_window(found.summary)]
            windows = windows[-find_stream_rule(schema).recent :]
            inputs = append_inputs(before.state.inputs, found.recorded, number)
            end: int | None = found.window[1]
            gate = labels[GATE]
            if screen.clock.is_backfill:
                # The next window begins where it would have, and is compared with those before.
                end, windows = before.state.end, before.state.windows
            ripe = (gate.ripe_after, gate.opened) if gate.matures else ((), ())
            commit_state(partial, StreamState(found.tables, inputs, windows, end, *ripe))
        if number == FIRST_INCREMENT:
            write_checked_json(root / STREAM_FILE, STREAM_FORMAT, description)


def _make_job(found: NextIncrement, options: PrepareOptions, types: dict[str, pa.DataType]) -> Job:
    """Return the job of writing, with the capacities of the tables."""
    schema, look = found.before.schema, found.summary
    vocabularies = {table: state.vocabulary() for table, state in found.tables.items()}
    fitted = FittedEncoding(vocabularies, found.moments, found.context.splits)
    # Earlier rows of the tasks pass through the same buckets, so they count.
    survey = Survey(0, look.rows_of_split.copy(), look.events_of_split)
    for name in found.context.splits.names:
        survey.rows_of_split[name] += found.before.state.open_newest_rows(name, schema).num_rows
    job = make_job(schema, options, fitted, survey, types)
    block = find_stream_rule(schema).capacity_block
    tables = tuple(
        replace(table, num_rows=choose_capacity(table.num_rows, block))
        if table.name in vocabularies
        else table
        for table in job.features.tables
    )
    return replace(job, features=replace(job.features, tables=tables))


def _write_resets(folder: Path, changes: dict[str, TableChange]) -> None:
    for table, change in changes.items():
        # Rows that were only freed need no reset before another value gets them.
        if len(change.reused):
            path = folder / RESET_FOLDER / f"{table}.parquet"
            path.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"row": change.reused}), path, store_schema=False)


def _make_report(found: NextIncrement, job: Job, num_late: int) -> dict[str, Any]:
    """Return the report on the increment, for `gmeta inspect` and its manifest; `num_late` rows
    came too late to be learnt from."""
    look, rule = found.summary, find_stream_rule(job.schema)
    capacities = {table.name: table.num_rows for table in job.features.tables}
    tables = {
        name: {
            "rows": state.num_rows + 1,
            "capacity": capacities[name],
            "new": found.changes[name].num_new,
            "freed": found.changes[name].num_freed,
            "reused": len(found.changes[name].reused),
            "pending": state.num_pending,
            "waiting": found.changes[name].num_waiting,
        }
        for name, state in found.tables.items()
    }
    moved = measure_drift(look, found.moments)
    alarms = find_alarms(look, num_late, moved, tables, rule, found.context.screen.clock.unit)
    alarms += [
        f"column {name} is missing in files of {num_rows:,} rows, which have its null"
        for name, num_rows in found.filled.items()
    ]
    filled = {"missing_columns": found.filled} if found.filled else {}
    backfill = {"backfill": look.num_known} if found.context.screen.clock.is_backfill else {}
    return {
        **backfill,
        "rows": look.num_rows,
        "late": num_late,
        "too_late": look.num_dropped,
        # Of all rows that were read, what became of each; the splits come as they are written.
        "account": {
            **{"read": look.num_read, "late": num_late, "too_late": look.num_dropped},
            "quarantined": look.set_aside.total(),
            **({"known": look.num_known} if backfill else {}),
        },
        "label_mean": summarise_window(look)["label_mean"],
        "tables": tables,
        "drift": moved,
        "alarms": alarms,
        **filled,
        "inputs": [file._asdict() for file in found.recorded],
    }


def _make_description(
    found: NextIncrement, job: Job, columns: list[str], types: dict[str, pa.DataType]
) -> dict[str, Any]:
    """Return what stream.json says: all that no increment changes."""
    schema = job.schema
    assert schema.time is not None
    body = {
        "schema": schema.to_json(),
        "moments": job.fitted.moments,
        "kinds": job.fitted.kinds,
        "task_kind": job.task_kind,
        "time_type": str(types[schema.time.column]),
        "time_unit": find_time_unit(schema, types[schema.time.column]),
        "columns": sorted(columns),
    }
    # Derived from schema and first files, so that the same files make the same stream.
    origin = [body["schema"], [file.xxh3 for file in found.recorded]]
    return {"stream": xxhash.xxh3_64_hexdigest(canonical_json(origin)), **body}
