"""prepare --extend: new files become the next increment of a stream, or nothing changes.

Summarise the rows (window, occurrences), number new values, encode the rows into buckets of
complete tasks, join each bucket with the newest earlier rows of its tasks, and write it as a shard.
Renaming the increment's folder is the commit."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from metaio.errors import AccessError, DataError, MissingColumnError, SchemaError, TooFewRowsError
from metaio.format.atomic_folder import lock_writer
from metaio.format.storage import find_file_system, is_local
from metaio.prepare.episodes.ordered_map import Progress, map_in_order
from metaio.prepare.episodes.splits import Splits, list_split_names
from metaio.prepare.episodes.survey import compute_mean_and_deviation
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.raw_columns import read_dense
from metaio.prepare.schema.schema import Schema, TextRule
from metaio.prepare.schema.values import parse_time
from metaio.prepare.source.input_files import list_file_names
from metaio.prepare.source.source import DuckSource, count_rows
from metaio.prepare.source.transform import check_trusted
from metaio.stream.backfill import check_backfill, check_new, find_known_rows
from metaio.stream.chain import (
    FIRST_INCREMENT,
    INCREMENTS,
    TICKS_PER_S,
    IncrementRecord,
    format_event_time,
    open_stream,
)
from metaio.stream.description import (
    OpenedStream,
    check_columns,
    choose_fill_types,
    infer_column_kinds,
    open_for_extension,
)
from metaio.stream.engine import Engine, LocalEngine
from metaio.stream.increment import NextIncrement, write_increment
from metaio.stream.numbering import Admission, Numbering, advance, merge_occurrences
from metaio.stream.quarantine import (
    RefusedFilesError,
    clear_quarantine,
    list_quarantine,
    make_refusal,
    note_refusal,
    refuse_files,
)
from metaio.stream.stream_state import remove_old_states
from metaio.stream.taken_files import (
    OfferedFiles,
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
    summarise_events,
)
from metaio.stream.window_checks import (
    describe_set_aside,
    find_faults,
    find_latest_time,
    summarise_window,
)
from metaio.stream.window_events import WindowEvents, open_window_events

EngineFactory = Callable[[DuckSource, Schema, PrepareOptions], Engine]


class _StoppedError(DataError):
    """A file lacks a column, and the stream is to stop there."""


@dataclass(frozen=True)
class _Screening:
    """How the files and rows of an increment are judged."""

    accept: bool  # what differs from recent increments, and times ahead of others
    strict: bool  # refuse all for a damaged row, and fail for a damaged file
    ranges: Mapping[str, tuple[float, float]]  # of labels
    backfill: bool = False  # all rows are from before the window


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
    backfill: bool = False,
    along: Sequence[str] = (),
    left_out: Callable[[RefusedFilesError], None] = lambda refusal: None,
    progress: Progress | None = None,
    engine_of: EngineFactory = LocalEngine,
) -> IncrementRecord:
    """Append raw tables to the stream at a local path; return the new increment. `begin` sets its
    window back to a time, which a wrong row has moved on; of a `backfill` all rows are older."""
    options = options or PrepareOptions()
    screening = _Screening(accept, strict, label_ranges or {}, backfill)
    if backfill and (begin or along):
        other = "--begin" if begin else "--along"
        raise DataError(
            f"--backfill and {other}: rows of an old partition are an increment of their own, and "
            "the window stays. Leave one of them out"
        )
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
        if unknown := screening.ranges.keys() - {*before.schema.label_columns}:
            known = ", ".join(before.schema.label_columns)
            raise DataError(f"--label-range names {min(unknown)}; labels are {known}. Correct it")
        list_quarantine(root)  # or a damaged note would be found behind the commit
        for lock in (root / INCREMENTS).glob(".*.lock"):
            lock.unlink()  # of one that was killed right behind its commit
        # The first schema is the caller's own; later it comes with the stream, perhaps from
        # elsewhere.
        if before.number != FIRST_INCREMENT:
            check_trusted(before.schema.transform)
        if begin:
            before = _set_back(before, begin)
        if backfill:
            check_backfill(before)
        append = partial(_append, before, options, screening, report_progress, engine_of)
        try:
            # Late tables join if they can: if all together are refused, inputs are tried alone, and
            # if these are taken, the late ones go into quarantine.
            taken, left = _with_along(append, inputs, along)
        except RefusedFilesError as error:
            if backfill:  # no note: the loop would try the files again with the next ones
                accept_too = ", or pass --accept if they are right" * (error.kind == "unusual")
                raise DataError(
                    f"--backfill was given {error.names}: {'; '.join(error.reasons)}. Mend the "
                    f"files{accept_too}, or leave them out"
                ) from error
            probe = partial(_probe, before, options, screening, engine_of)
            refusal = error if screening.strict else _narrow(error, probe)
            _note(before, refusal)
            raise refusal from error.__cause__
        # After the commit: until then the next try needs the state of the last increment.
        remove_old_states(root, before.number)
        # After --begin what waited is in time.
        notes = [note for note in list_quarantine(root) if begin and note.get("with_next")]
        waiting = [file["name"] for note in notes for file in note["files"]]
        clear_quarantine(root, [*(file.name for file in taken.given), *waiting])
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
        if not along or is_alike or of_machine or isinstance(error, _StoppedError):
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
        stops = find_stream_rule(before.schema).missing == "stop"
        if stops and isinstance(error, MissingColumnError):
            raise _StoppedError(
                f"{error}. The stream stops at it: [stream] missing of its schema is 'stop'"
            ) from error
        if few is None and screening.strict:
            raise
        names = list_file_names(inputs) if few is None else few.files
        wrong = [hash_file(name) for name in names]
        check_not_taken(OfferedFiles(wrong, wrong, {}), taken_files)
        raise make_refusal(wrong, error) from error
    with source:
        engine = engine_of(source, before.schema, options)
        read = engine.describe_files(source.names)
        files = collect_files(source.given, source.members, read, source.empty)
        check_not_taken(files, taken_files, may_differ=screening.backfill)
        # Hashes alone refuse files that were taken, before any row is read.
        duplicates = find_duplicates(files, taken_files, source.has_rows)
        if duplicates:
            raise RefusedFilesError(list(duplicates), list(duplicates.values()), "doubled")
        with nullcontext() if screening.strict else refuse_files(files.given):
            types, context = _check_types(before, source, screening)
        with open_window_events(before, types, options) as events:
            looked = before, engine, context, files, events, source.count_absent()
            found = _inspect_rows(*looked, options, screening, is_alone, report_progress)
            write_increment(found, engine, source, types, options, report_progress)
    return files


def _open_source(before: OpenedStream, options: PrepareOptions, inputs: list[str]) -> DuckSource:
    return DuckSource(
        inputs,
        before.schema,
        memory_bytes=options.memory_of_log(before.schema),
        threads=options.threads,
        fill=choose_fill_types(before),
    )


def _check_types(
    before: OpenedStream, source: DuckSource, screening: _Screening
) -> tuple[dict[str, pa.DataType], SummaryContext]:
    """Return the columns' types, and what summarising needs; raise DataError for other types."""
    types = source.arrow_types(before.schema.columns)
    check_columns(before, source.names[0], types, source.find_distinct)
    context = _make_context(before, types, screening)
    for table, kind in context.value_types.items():
        known = before.state.tables.get(table)
        if known is not None and not known.values.type.equals(kind):
            raise SchemaError(
                f"a column that joins the stream shares table {table}, and one of the two holds "
                "text, the other integers. Give it a table of its own"
            )
    return types, context


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
    known, end = before.description or {}, before.state.end
    unit = known.get("time_unit", "s")
    if begin.isdecimal() and "int" in known.get("time_type", "int"):
        ticks = parse_time(begin, pa.int64(), "--begin")
    else:  # as messages name it, whatever the column holds
        micros = parse_time(begin, pa.timestamp("us"), "--begin")
        ticks = round(micros // 10**6 * TICKS_PER_S[unit])
    if end is None or ticks >= end:
        raise DataError(
            f"--begin is {begin}; the window begins at {format_event_time(end or 0, unit)}, and "
            "can only be set back. Give an earlier time, or leave --begin out"
        )
    return replace(before, state=replace(before.state, end=ticks))


def _inspect_rows(
    before: OpenedStream,
    engine: Engine,
    context: SummaryContext,
    files: OfferedFiles,
    events: WindowEvents,
    filled: dict[str, int],
    options: PrepareOptions,
    screening: _Screening,
    is_alone: bool,
    report_progress: Progress,
) -> NextIncrement:
    """Return what the new rows hold, judged and numbered; raise RefusedFilesError for bad ones."""
    rule = find_stream_rule(before.schema)
    with refuse_files(files.given):
        context, summary = _summarise(engine, context, screening, report_progress)
    if screening.backfill:
        context = find_known_rows(before, context, summary)
        if context.screen.known is not None:
            context, summary = _summarise(engine, context, screening, report_progress)
        summary.num_known, summary.num_dropped = summary.num_dropped, 0
        check_new(summary, ", ".join(file.name for file in files.given))
    for column in filled:
        summary.nulls.pop(column, None)  # they say nothing of the rows
    clock = context.screen.clock
    # With labels that mature late rows are usual: they correct others.
    mostly_in = is_alone and not screening.accept and not any(clock.delays)
    if late := _find_lateness(summary, clock, mostly_in):
        raise RefusedFilesError(files.given, [late], "late")
    window, windows = summarise_window(summary), before.state.windows
    reasons = []
    if not screening.accept:
        # A part of a partition may be of any size.
        reasons = find_faults(window, windows, rule, clock.unit, not screening.backfill)
    if reasons:
        raise RefusedFilesError(files.given, reasons, "unusual")
    look = partial(summarise_events, context)
    for part in map_in_order(options.threads, look, events.read()):
        summary.add(part, context.admissions)
    # Frozen by the first increment that has them, so that dense inputs keep their units.
    moments = {name: compute_mean_and_deviation(*known) for name, known in summary.moments.items()}
    moments |= before.moments
    start = summary.least_time if clock.start is None else clock.start
    tables, changes = {}, {}
    for table, least in context.admissions.items():
        admission = Admission(least, start, clock.ttl, clock.grace, rule.max_new_rows)
        old = before.state.tables.get(table) or Numbering.empty(context.value_types[table])
        tables[table], changes[table] = advance(
            old, merge_occurrences(summary.occurrences[table], least), admission
        )
    return NextIncrement(before, summary, context, files, events, filled, tables, changes, moments)


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
    clock = StreamClock.of(schema, unit, before.state.end)
    clock = replace(clock, is_backfill=screening.backfill)
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
