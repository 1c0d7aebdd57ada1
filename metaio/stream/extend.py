"""prepare --extend: new files become the next increment of a stream, or nothing changes.

Summarise the rows (window, occurrences), number new values, encode the rows into buckets of
complete tasks, join each bucket with the newest earlier rows of its tasks, and write it as a shard.
Renaming the increment's folder is the commit."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from metaio.errors import AccessError, DataError, TooFewRowsError
from metaio.format.atomic_folder import lock_writer
from metaio.format.checked_json import write_checked_json
from metaio.format.layout import RESET_FOLDER
from metaio.format.manifest import StreamPlace, canonical_json
from metaio.format.storage import find_file_system, is_local
from metaio.prepare.episodes.encode import FittedEncoding
from metaio.prepare.episodes.ordered_map import Progress
from metaio.prepare.episodes.splits import Splits, list_split_names
from metaio.prepare.episodes.survey import Survey, compute_mean_and_deviation
from metaio.prepare.job import Job, PrepareOptions, make_job
from metaio.prepare.schema.raw_columns import read_dense
from metaio.prepare.schema.schema import Schema, TextRule
from metaio.prepare.schema.values import parse_time
from metaio.prepare.source.bad_lines import write_bad_lines
from metaio.prepare.source.input_files import list_file_names
from metaio.prepare.source.source import DuckSource, count_rows
from metaio.prepare.source.transform import check_trusted, describe_transform
from metaio.stream.chain import (
    FIRST_INCREMENT,
    INCREMENTS,
    STREAM_FILE,
    STREAM_FORMAT,
    IncrementRecord,
    format_event_time,
    name_increment_folder,
    open_stream,
)
from metaio.stream.description import (
    OpenedStream,
    check_columns,
    infer_column_kinds,
    open_for_extension,
)
from metaio.stream.engine import Engine, LocalEngine, WindowJob
from metaio.stream.numbering import (
    Admission,
    Numbering,
    TableChange,
    advance,
    choose_capacity,
    merge_occurrences,
)
from metaio.stream.quarantine import (
    RefusedFilesError,
    clear_quarantine,
    list_quarantine,
    note_refusal,
)
from metaio.stream.stream_state import (
    StreamState,
    commit_state,
    open_new_state,
    remove_old_states,
    write_tables,
)
from metaio.stream.taken_files import (
    InputFile,
    OfferedFiles,
    append_inputs,
    check_not_taken,
    collect_files,
    find_duplicates,
    hash_file,
)
from metaio.stream.window import (
    RowScreen,
    StreamClock,
    SummaryContext,
    WindowSummary,
    find_stream_rule,
    find_time_unit,
)
from metaio.stream.window_checks import (
    describe_set_aside,
    find_alarms,
    find_faults,
    find_latest_time,
    measure_drift,
    summarise_window,
)

EngineFactory = Callable[[DuckSource, Schema, PrepareOptions], Engine]


@dataclass(frozen=True)
class _Screening:
    """How the files and rows of an increment are judged."""

    accept: bool  # what differs from recent increments, and times ahead of others
    strict: bool  # refuse all for a damaged row, and fail for a damaged file
    ranges: Mapping[str, tuple[float, float]]  # of labels


@dataclass(frozen=True)
class _NextIncrement:
    """The increment that is being made: what it is made of, and what was found out about it."""

    before: OpenedStream
    summary: WindowSummary
    context: SummaryContext
    files: OfferedFiles
    tables: dict[str, Numbering]
    changes: dict[str, TableChange]
    moments: dict[str, tuple[float, float]]

    @property
    def window(self) -> tuple[int, int]:
        """Return the span of event time; it begins where the one before ended."""
        start = self.context.screen.clock.start
        return self.summary.least_time if start is None else start, self.summary.most_time + 1


def extend(
    inputs: list[str],
    stream: str,
    schema: Schema | None = None,
    options: PrepareOptions | None = None,
    *,
    accept: bool = False,
    strict: bool = False,
    label_ranges: Mapping[str, tuple[float, float]] | None = None,
    begin: str = "",
    along: Sequence[str] = (),
    left_out: Callable[[RefusedFilesError], None] = lambda refusal: None,
    progress: Progress | None = None,
    engine_of: EngineFactory = LocalEngine,
) -> IncrementRecord:
    """Append raw tables to the stream at a local path; return the new increment. `begin` sets its
    window back to a time, which a wrong row has moved on."""
    options = options or PrepareOptions()
    screening = _Screening(accept, strict, label_ranges or {})
    report_progress = progress or (lambda phase, done, total: None)
    fs, place = find_file_system(stream)
    if not is_local(fs):
        raise DataError(
            f"{stream} is a URL: a stream is extended at a local path, where a rename commits an "
            "increment. Extend it there, and copy it"
        )
    root = Path(place)
    root.parent.mkdir(parents=True, exist_ok=True)
    # One writer at a time: two would give one row to different values.
    with lock_writer(root.parent / f".{root.name}.extend.lock", stream):
        # Only the first call, which makes the stream, needs a schema.
        before = open_for_extension(root, schema)
        list_quarantine(root)  # or a damaged note would be found behind the commit
        for lock in (root / INCREMENTS).glob(".*.lock"):
            lock.unlink()  # of one that was killed right behind its commit
        # The first schema is the caller's own; later it comes with the stream, perhaps from
        # elsewhere.
        if before.number != FIRST_INCREMENT:
            check_trusted(before.schema.transform)
        if begin:
            before = _set_back(before, begin)
        append = partial(_append, before, options, screening, report_progress, engine_of)
        try:
            # Late tables join if they can: if all together are refused, inputs are tried alone, and
            # if these are taken, the late ones go into quarantine.
            taken, left = _with_along(append, inputs, along)
        except RefusedFilesError as error:
            probe = partial(_probe, before, options, screening, engine_of)
            refusal = error if screening.strict else _narrow(error, probe)
            _note(before, refusal)
            raise refusal from error.__cause__
        # After the commit: until then the next try needs the state of the last increment.
        remove_old_states(root, before.number)
        clear_quarantine(root, [file.name for file in taken.given])
        if begin:  # what waited is in time by now
            waiting = [note["files"] for note in list_quarantine(root) if note.get("with_next")]
            clear_quarantine(root, [file["name"] for files in waiting for file in files])
        if left is not None:
            _note(before, left)
            left_out(left)
    return open_stream(stream).record(before.number)


def _with_along(
    append: Callable[[list[str], bool], OfferedFiles], inputs: list[str], along: Sequence[str]
) -> tuple[OfferedFiles, RefusedFilesError | None]:
    """Append `inputs` with `along`, or else without; return what was taken, and why not more."""
    try:
        return append([*inputs, *along], not along), None
    except DataError as error:
        refused = error if isinstance(error, RefusedFilesError) else None
        # Inputs alone would be refused, too; or the machine fails, such as by a full disk.
        is_alike = refused is not None and refused.kind in ("doubled", "few", "late")
        of_machine = isinstance(error, AccessError) or getattr(error.__cause__, "errno", None)
        if not along or is_alike or of_machine:
            raise
        reasons = [str(error)] if refused is None else refused.reasons
    late = [hash_file(name) for name in dict.fromkeys(list_file_names(along))]
    files = append(inputs, True)
    left = [file for file in late if file not in files.given]
    return files, RefusedFilesError(left, reasons) if left else None


def _append(
    before: OpenedStream,
    options: PrepareOptions,
    screening: _Screening,
    report_progress: Progress,
    engine_of: EngineFactory,
    inputs: list[str],
    is_alone: bool,
) -> OfferedFiles:
    """Write the next increment of these files; raise RefusedFilesError for suspicious ones."""
    taken_files = before.state.inputs
    try:
        source = _open_source(before, options, inputs)
    except AccessError:
        raise
    except DataError as error:
        few = error if isinstance(error, TooFewRowsError) else None
        if few is None and screening.strict:
            raise
        names = list_file_names(inputs) if few is None else few.files
        wrong = [hash_file(name) for name in names]
        check_not_taken(OfferedFiles(wrong, wrong, {}), taken_files)
        if few is not None:
            raise _make_few_error(wrong, few) from few
        raise RefusedFilesError(wrong, [str(error)]) from error
    with source:
        engine = engine_of(source, before.schema, options)
        read = engine.describe_files(source.names)
        files = collect_files(source.given, source.members, read, source.empty)
        check_not_taken(files, taken_files)
        # Hashes alone refuse files that were taken, before any row is read.
        duplicates = find_duplicates(files, taken_files, source.has_rows)
        if duplicates:
            raise RefusedFilesError(list(duplicates), list(duplicates.values()), "doubled")
        with nullcontext() if screening.strict else _refuse_files(files):
            types, context = _check_types(before, source, screening)
        found = _inspect_rows(before, engine, context, files, screening, is_alone, report_progress)
        _write(found, engine, source, types, options, report_progress)
    return files


def _open_source(before: OpenedStream, options: PrepareOptions, inputs: list[str]) -> DuckSource:
    memory_bytes = options.memory_bytes // 2  # the other half is for encoded rows
    return DuckSource(inputs, before.schema, memory_bytes=memory_bytes, threads=options.threads)


def _check_types(
    before: OpenedStream, source: DuckSource, screening: _Screening
) -> tuple[dict[str, pa.DataType], SummaryContext]:
    """Return the columns' types, and what summarising needs; raise DataError for other types."""
    types = source.arrow_types(before.schema.columns)
    check_columns(before, source.names[0], types, source.find_distinct)
    return types, _make_context(before, types, screening)


def _probe(
    before: OpenedStream,
    options: PrepareOptions,
    screening: _Screening,
    engine_of: EngineFactory,
    names: list[str],
) -> None:
    """Raise DataError if these files cannot be taken for what they hold."""
    with _open_source(before, options, names) as source:
        engine = engine_of(source, before.schema, options)
        _, context = _check_types(before, source, screening)
        _summarise(engine, context, screening, lambda phase, done, total: None)
        # Else only encoding reads them; there Spark would have to.
        for batch in source.batches(before.schema.columns) if engine_of is LocalEngine else ():
            for dense in before.schema.dense:
                read_dense(dense, batch[dense.column].drop_null())


def _narrow(refusal: RefusedFilesError, probe: Callable[[list[str]], None]) -> RefusedFilesError:
    """Return the refusal of only the files that are damaged, where the others can be taken."""
    names = [file.name for file in refusal.files]
    if refusal.kind != "rows" or len(names) == 1:
        return refusal
    damaged = _find_damaged(probe, names)
    files = [file for file in refusal.files if file.name in damaged]
    return RefusedFilesError(files, [*dict.fromkeys(damaged.values())]) if files else refusal


def _find_damaged(probe: Callable[[list[str]], None], names: list[str]) -> dict[str, str]:
    """Return the damaged files with the reasons; all, where halves can be taken only alone."""
    try:
        probe(names)
    except AccessError:
        raise
    except TooFewRowsError:
        return {}
    except DataError as error:
        middle = len(names) // 2
        halves = (names[:middle], names[middle:]) if middle else ()
        found = {name: why for half in halves for name, why in _find_damaged(probe, half).items()}
        return found or dict.fromkeys(names, str(error))
    return {}


def _note(before: OpenedStream, refusal: RefusedFilesError) -> None:
    names = [file.name for file in refusal.files]
    num_rows = count_rows(names, before.schema.text or TextRule())
    note_refusal(before.root, before.number, refusal, before.mark, num_rows)


def _set_back(before: OpenedStream, begin: str) -> OpenedStream:
    """Return a stream whose next window begins at a time that a person gives."""
    known, end, kind = before.description or {}, before.state.end, pa.int64()
    unit = known.get("time_unit", "s")
    if "int" not in known.get("time_type", "int"):
        kind = pa.date32() if unit == "day" else pa.timestamp("us")
    ticks = parse_time(int(begin) if begin.isdecimal() else begin, kind, "--begin")
    if end is None or ticks >= end:
        raise DataError(
            f"--begin is {begin}; the window begins at {format_event_time(end or 0, unit)}, and "
            "can only be set back. Give an earlier time, or leave --begin out"
        )
    return replace(before, state=replace(before.state, end=ticks))


def _make_few_error(files: list[InputFile], error: TooFewRowsError) -> RefusedFilesError:
    # Its remedy is for a dataset; a stream takes such files together with others.
    what, _, remedy = str(error).rpartition(". ")
    return RefusedFilesError(files, [what or remedy], "few")


@contextmanager
def _refuse_files(files: OfferedFiles) -> Iterator[None]:
    """Turn errors about rows into a refusal of their files."""
    try:
        yield
    # Disk or network failed: the same files may be read later.
    except AccessError:
        raise
    except TooFewRowsError as error:
        raise _make_few_error(files.given, error) from error
    except DataError as error:
        raise RefusedFilesError(files.given, [str(error)]) from error


def _inspect_rows(
    before: OpenedStream,
    engine: Engine,
    context: SummaryContext,
    files: OfferedFiles,
    screening: _Screening,
    is_alone: bool,
    report_progress: Progress,
) -> _NextIncrement:
    """Return what the new rows hold, judged and numbered; raise RefusedFilesError for bad ones."""
    rule = find_stream_rule(before.schema)
    with _refuse_files(files):
        context, summary = _summarise(engine, context, screening, report_progress)
    clock = context.screen.clock
    if late := _find_lateness(summary, clock, is_alone and not screening.accept):
        raise RefusedFilesError(files.given, [late], "late")
    window, windows = summarise_window(summary), before.state.windows
    reasons = [] if screening.accept else find_faults(window, windows, rule, clock.unit)
    if reasons:
        raise RefusedFilesError(files.given, reasons, "unusual")
    # Frozen by the first increment, so that dense inputs keep their units.
    moments = before.moments
    if moments is None:
        moments = {
            name: compute_mean_and_deviation(*known) for name, known in summary.moments.items()
        }
    start = summary.least_time if clock.start is None else clock.start
    tables, changes = {}, {}
    for table, least in context.admissions.items():
        admission = Admission(least, start, clock.ttl, clock.grace, rule.max_new_rows)
        old = before.state.tables.get(table) or Numbering.empty(context.value_types[table])
        tables[table], changes[table] = advance(
            old, merge_occurrences(summary.occurrences[table], least), admission
        )
    return _NextIncrement(before, summary, context, files, tables, changes, moments)


def _summarise(
    engine: Engine, context: SummaryContext, screening: _Screening, report_progress: Progress
) -> tuple[SummaryContext, WindowSummary]:
    """Return what the rows hold, without those of a wrong clock, and the context by which these
    are set aside; raise DataError if too many rows are set aside."""
    summary, clock = engine.summarise(context, report_progress), context.screen.clock
    latest = find_latest_time(summary.times, clock, context.is_dated, time.time())
    if latest is not None and summary.most_time > latest and not screening.accept:
        ahead = format_event_time(summary.most_time, clock.unit)
        context = replace(context, screen=replace(context.screen, latest=latest, ahead=ahead))
        # A second look, which hardly ever is needed: the vocabulary must not know these rows.
        summary = engine.summarise(context, report_progress)
    num_wrong = summary.set_aside.total()
    if num_wrong > (0 if screening.strict else summary.num_rows + summary.num_dropped):
        raise DataError(describe_set_aside(summary))
    return context, summary


def _make_context(
    before: OpenedStream, types: dict[str, pa.DataType], screening: _Screening
) -> SummaryContext:
    """Return what summarising the rows needs."""
    schema = before.schema
    assert schema.time is not None
    unit = find_time_unit(schema, types[schema.time.column])
    kinds = infer_column_kinds(schema, types)
    value_types = {
        table: pa.int64()
        if all(kinds[c.column] == "integer" for c in schema.sparse if c.table_name == table)
        else pa.large_string()
        for table in (c.table_name for c in schema.sparse if c.vocabulary is not None)
    }
    clock = StreamClock.of(find_stream_rule(schema), unit, before.state.end)
    screen = RowScreen(schema, clock, screening.ranges)
    is_dated = not pa.types.is_integer(types[schema.time.column])
    return SummaryContext(schema, Splits(list_split_names(schema)), screen, value_types, is_dated)


def _find_lateness(summary: WindowSummary, clock: StreamClock, mostly_in: bool) -> str:
    """Return how many rows are late if all are, or with `mostly_in` most of them; "" if not."""
    num_late = summary.num_late + summary.num_dropped
    num_rows = summary.num_rows + summary.num_dropped
    if num_late < num_rows and not (mostly_in and 2 * num_late > num_rows):
        return ""
    share = "all" if num_late == num_rows else f"{num_late:,}"
    begin = format_event_time(clock.start or 0, clock.unit)
    return f"{share} of its {num_rows:,} rows are from before the window, which begins at {begin}"


def _write(
    found: _NextIncrement,
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
    window = WindowJob(job, screen, freed, before.state.folder, found.summary.num_rows)
    # In this order: a state counts once its increment exists, a description once there is one.
    with job.open(str(root / INCREMENTS / name_increment_folder(number))) as writer:
        description = before.description or _make_description(found, job, source.columns, types)
        with open_new_state(root, number) as partial:
            write_tables(partial, found.tables)
            with _refuse_files(found.files):
                written = engine.write(window, found.tables, writer, partial, report_progress)
            job.write_vocabularies(writer.folder)
            write_bad_lines(writer.folder, source.bad_lines)
            _write_resets(writer.folder, found.changes)
            new_columns = sorted(set(source.columns) - set(description["columns"]))
            report = _make_report(found, job) | {"tasks": written.tasks, "new_columns": new_columns}
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
            inputs = append_inputs(before.state.inputs, found.files.recorded, number)
            commit_state(partial, StreamState(found.tables, inputs, windows, found.window[1]))
        if number == FIRST_INCREMENT:
            write_checked_json(root / STREAM_FILE, STREAM_FORMAT, description)


def _make_job(found: _NextIncrement, options: PrepareOptions, types: dict[str, pa.DataType]) -> Job:
    """Return the job of writing, with the capacities of the tables."""
    schema, look = found.before.schema, found.summary
    vocabularies = {table: state.vocabulary() for table, state in found.tables.items()}
    fitted = FittedEncoding(vocabularies, found.moments, found.context.splits)
    # Earlier rows of the tasks pass through the same buckets, so they count.
    survey = Survey(rows_of_split=look.rows_of_split.copy())
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


def _make_report(found: _NextIncrement, job: Job) -> dict[str, Any]:
    """Return the report on the increment, for `gmeta inspect` and its manifest."""
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
    return {
        "rows": look.num_rows,
        "late": look.num_late,
        "too_late": look.num_dropped,
        # Of all rows that were read, what became of each; the splits come as they are written.
        "account": {
            **{"read": look.num_read, "late": look.num_late, "too_late": look.num_dropped},
            "quarantined": look.set_aside.total(),
        },
        "label_mean": summarise_window(look)["label_mean"],
        "tables": tables,
        "drift": moved,
        "alarms": find_alarms(look, moved, tables, rule, found.context.screen.clock.unit),
        "inputs": [file._asdict() for file in found.files.recorded],
    }


def _make_description(
    found: _NextIncrement, job: Job, columns: list[str], types: dict[str, pa.DataType]
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
    origin = [body["schema"], [file.xxh3 for file in found.files.recorded]]
    return {"stream": xxhash.xxh3_64_hexdigest(canonical_json(origin)), **body}
