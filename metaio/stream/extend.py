"""prepare --extend: new files become the next increment of a stream, whole or not at all.

Look at the rows once (their window, what occurs in them), number the new values, encode the rows
into buckets of whole tasks on disk, join each bucket with the newest rows of its tasks from before
the window, and write it as a shard. Renaming the increment's folder is the commit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from metaio.errors import AccessError, DataError, TooFewRowsError
from metaio.format.checked_json import write_checked
from metaio.format.destination import one_writer
from metaio.format.layout import RESET_FOLDER
from metaio.format.manifest import StreamPlace, canonical_json
from metaio.format.storage import file_system, is_local
from metaio.prepare.encode import Fitted
from metaio.prepare.in_order import Progress
from metaio.prepare.inputs import file_names
from metaio.prepare.job import Job, PrepareOptions, make_job
from metaio.prepare.schema import Schema
from metaio.prepare.source import DuckSource
from metaio.prepare.splits import Splits, split_names
from metaio.prepare.survey import Survey, mean_and_deviation
from metaio.prepare.transform import check_trusted, told_transform
from metaio.stream.chain import (
    FIRST_INCREMENT,
    INCREMENTS,
    STREAM_FILE,
    STREAM_FORMAT,
    IncrementRecord,
    event_time,
    folder_of,
    open_stream,
)
from metaio.stream.description import Before, check_columns, column_kinds, opened
from metaio.stream.engine import Engine, OneMachine, Window
from metaio.stream.inputs import (
    InputFile,
    Offered,
    described,
    doubled,
    offered,
    refuse_known,
    with_inputs,
)
from metaio.stream.numbering import Admission, Change, Numbering, advanced, capacity_of, merged
from metaio.stream.quarantine import (
    RefusedFilesError,
    clear_quarantine,
    list_quarantine,
    note_refusal,
)
from metaio.stream.screen import alarms, drift, faults, statistics_of
from metaio.stream.state import State, commit_state, new_state, remove_old_states, write_tables
from metaio.stream.window import Clock, Look, Looking, rule_of, time_unit

EngineOf = Callable[[DuckSource, Schema, PrepareOptions], Engine]


@dataclass(frozen=True)
class _Next:
    """The increment that is being made: what it is made of, and what was found out about it."""

    before: Before
    look: Look
    clock: Clock
    splits: Splits
    files: Offered
    tables: dict[str, Numbering]
    changes: dict[str, Change]
    moments: dict[str, tuple[float, float]]

    @property
    def window(self) -> tuple[int, int]:
        """Return the span of event time: it begins where the one before ended."""
        start = self.clock.start
        return self.look.least_time if start is None else start, self.look.most_time + 1


def extend(
    inputs: list[str],
    stream: str,
    schema: Schema | None = None,
    options: PrepareOptions | None = None,
    *,
    accept: bool = False,
    along: Sequence[str] = (),
    left_out: Callable[[RefusedFilesError], None] = lambda refusal: None,
    progress: Progress | None = None,
    engine_of: EngineOf = OneMachine,
) -> IncrementRecord:
    """Append the rows of raw tables to the stream at a local path, which the first call makes; it
    alone needs a schema. Return the new increment.

    Tables `along`, such as those that came late, become part of it if they can: if all together are
    refused, `inputs` are tried alone, and once these are taken, `along` is quarantined and
    `left_out` is told. Raises QuarantinedError: the rows are not to be trusted; `accept` takes them
    all the same, as far as they can be trained on. Or they are too few for an increment of their
    own.
    """
    options, tell = options or PrepareOptions(), progress or (lambda phase, done, total: None)
    fs, place = file_system(stream)
    if not is_local(fs):
        raise DataError(
            f"{stream} is a URL: a stream is extended at a local path, where a rename commits an "
            "increment. Extend it there, and copy it"
        )
    root = Path(place)
    root.parent.mkdir(parents=True, exist_ok=True)
    with one_writer(root.parent / f".{root.name}.extend.lock", stream):
        before = opened(root, schema)
        list_quarantine(root)  # or a damaged note would be found behind the commit
        for lock in (root / INCREMENTS).glob(".*.lock"):
            lock.unlink()  # of one that was killed right behind its commit
        if before.number != FIRST_INCREMENT:
            check_trusted(before.schema.transform)
        append = partial(_append, before, options, accept, tell, engine_of)
        try:
            files, refusal = _with_along(append, inputs, along)
        except RefusedFilesError as error:
            note_refusal(root, before.number, error, before.mark)
            raise
        remove_old_states(root, before.number)
        clear_quarantine(root, files.given)
        if refusal is not None:
            note_refusal(root, before.number, refusal, before.mark)
            left_out(refusal)
    return open_stream(stream).record(before.number)


def _with_along(
    append: Callable[[list[str], bool], Offered], inputs: list[str], along: Sequence[str]
) -> tuple[Offered, RefusedFilesError | None]:
    """Append `inputs` together with `along`, or else without; return the files that were taken, and
    why those of `along` were not. Raise DataError as `_append` does."""
    try:
        return append([*inputs, *along], not along), None
    except DataError as error:
        refused = error if isinstance(error, RefusedFilesError) else None
        # Then the inputs alone would be refused as well; or the machine fails, such as a full disk.
        is_alike = refused is not None and refused.kind in ("doubled", "few")
        of_machine = isinstance(error, AccessError) or getattr(error.__cause__, "errno", None)
        if not along or is_alike or of_machine:
            raise
        reasons = [str(error)] if refused is None else refused.reasons
    late = [described(name) for name in dict.fromkeys(file_names(along))]
    files = append(inputs, True)
    left = [file for file in late if file not in files.given]
    return files, RefusedFilesError(left, reasons) if left else None


def _append(
    before: Before,
    options: PrepareOptions,
    accept: bool,
    tell: Progress,
    engine_of: EngineOf,
    inputs: list[str],
    is_alone: bool,
) -> Offered:
    """Write the next increment, of files alone (`is_alone`) or with what came late, and return
    them. Raise RefusedFilesError for files that are not to be trusted, or make no increment,
    DataError as `extend` does."""
    root, schema, taken = before.root, before.schema, before.state.inputs
    memory_bytes = options.memory_bytes // 2  # the other half is for encoded rows
    try:
        source = DuckSource(inputs, schema, memory_bytes=memory_bytes, threads=options.threads)
    except TooFewRowsError as error:
        empty = [described(name) for name in error.files]
        refuse_known(Offered(empty, empty, {}), taken)
        raise _few(empty, error) from error
    with source:
        engine = engine_of(source, schema, options)
        read = engine.described(source.names)
        files = offered(source.given, source.members, read, source.empty)
        refuse_known(files, taken)
        twice = doubled(files, taken, source.has_rows)
        if twice:
            raise RefusedFilesError(list(twice), list(twice.values()), "doubled")
        types = source.arrow_types(schema.columns)
        check_columns(before, source.names[0], types, source.distinct)
        found = _looked_at(before, engine, types, files, accept, is_alone, tell)
        _write(root, found, engine, source, types, options, tell)
    return files


def _few(files: list[InputFile], error: TooFewRowsError) -> RefusedFilesError:
    # Its remedy is for those who prepare a dataset: a stream takes them with others.
    what, _, remedy = str(error).rpartition(". ")
    return RefusedFilesError(files, [what or remedy], "few")


@contextmanager
def _judged(files: Offered) -> Iterator[None]:
    """Refuse files for what their rows hold: that they have the columns is known before."""
    try:
        yield
    except AccessError:
        raise
    except TooFewRowsError as error:
        raise _few(files.given, error) from error
    except DataError as error:
        raise RefusedFilesError(files.given, [str(error)]) from error


def _looked_at(
    before: Before,
    engine: Engine,
    types: dict[str, pa.DataType],
    files: Offered,
    accept: bool,
    is_alone: bool,
    tell: Progress,
) -> _Next:
    """Return what the new rows hold, judged and numbered. Raise RefusedFilesError for those that
    are not to be trusted, or make no window."""
    looking, rule = _looking(before, types), rule_of(before.schema)
    clock = looking.clock
    with _judged(files):
        look = engine.look(looking, tell)
        _check_window(look, clock, is_alone and not accept)
    reasons = [] if accept else faults(statistics_of(look), before.state.windows, rule, clock.unit)
    if reasons:
        raise RefusedFilesError(files.given, reasons, "unusual")
    moments = before.moments
    if moments is None:
        moments = {name: mean_and_deviation(*known) for name, known in look.moments.items()}
    start = look.least_time if clock.start is None else clock.start
    tables, changes = {}, {}
    for table, least in looking.admissions.items():
        admission = Admission(least, start, clock.ttl, clock.grace, rule.max_new_rows)
        old = before.state.tables.get(table) or Numbering.empty(looking.value_types[table])
        tables[table], changes[table] = advanced(old, merged(look.seen[table], least), admission)
    return _Next(before, look, clock, looking.splits, files, tables, changes, moments)


def _looking(before: Before, types: dict[str, pa.DataType]) -> Looking:
    """Return what the first look at the rows needs to know."""
    schema = before.schema
    assert schema.time is not None
    unit = time_unit(schema, types[schema.time.column])
    kinds = column_kinds(schema, types)
    value_types = {
        table: pa.int64()
        if all(kinds[c.column] == "integer" for c in schema.sparse if c.table_name == table)
        else pa.large_string()
        for table in (c.table_name for c in schema.sparse if c.vocabulary is not None)
    }
    clock = Clock.of(rule_of(schema), unit, before.state.end)
    return Looking(schema, Splits(split_names(schema)), clock, value_types)


def _check_window(look: Look, clock: Clock, mostly_in: bool) -> None:
    """Raise DataError or TooFewRowsError where the rows make no window, or where less than half of
    them are in it though they are to be `mostly_in`."""
    if look.num_rows and look.least_time < 0:
        raise DataError(
            f"a row has the time {look.least_time}; times from 0 on are allowed in a stream"
        )
    num_late, num_rows = look.num_late + look.num_dropped, look.num_rows + look.num_dropped
    if num_late == num_rows or (mostly_in and 2 * num_late > num_rows):
        share = "all" if num_late == num_rows else f"{num_late:,}"
        begin = event_time(clock.start or 0, clock.unit)
        raise TooFewRowsError(
            f"{share} of its {num_rows:,} rows are from before the window, which begins at {begin}"
        )


def _write(
    root: Path,
    found: _Next,
    engine: Engine,
    source: DuckSource,
    types: dict[str, pa.DataType],
    options: PrepareOptions,
    tell: Progress,
) -> None:
    """Write the increment and the state behind it; both are there once this returns."""
    before, number = found.before, found.before.number
    schema = before.schema
    job = _job(found, options, types)
    freed = {table: change.freed for table, change in found.changes.items()}
    window = Window(job, found.clock, freed, before.state.folder, found.look.num_rows)
    # In this order: a state counts once its increment is there, a description once there is one.
    with job.open(str(root / INCREMENTS / folder_of(number))) as writer:
        description = before.description or _description(found, job, source.columns, types)
        with new_state(root, number) as partial:
            write_tables(partial, found.tables)
            with _judged(found.files):
                written = engine.write(window, found.tables, writer, partial, tell)
            job.write_vocabularies(writer.folder)
            _write_resets(writer.folder, found.changes)
            new_columns = sorted(set(source.columns) - set(description["columns"]))
            report = _report(found, job) | {"tasks": written.tasks, "new_columns": new_columns}
            # Only what there was, as prepare has it.
            lost = written.dropped.report()
            lost |= {name: count for name, count in source.left_out.items() if count}
            hashed = written.use.report()
            writer.report = {"dropped": lost, "hashed_tables": hashed, "stream": report}
            writer.report |= told_transform(schema.transform)
            freed_rows = {table: change.num_freed for table, change in found.changes.items()}
            writer.stream = StreamPlace(
                description["stream"], number, before.parent, found.window, freed_rows
            )
            recent = [*before.state.windows, statistics_of(found.look)][-rule_of(schema).recent :]
            state = State(
                found.tables,
                with_inputs(before.state.inputs, found.files.recorded, number),
                recent,
                found.window[1],
            )
            commit_state(partial, state)
        if number == FIRST_INCREMENT:
            write_checked(root / STREAM_FILE, STREAM_FORMAT, description)


def _job(found: _Next, options: PrepareOptions, types: dict[str, pa.DataType]) -> Job:
    """Return the job of writing: the tables have their capacities."""
    schema, look = found.before.schema, found.look
    vocabularies = {table: state.vocabulary() for table, state in found.tables.items()}
    fitted = Fitted(vocabularies, found.moments, found.splits)
    # The rows from before pass through the same buckets.
    survey = Survey(rows_of_split=look.rows_of_split.copy())
    for name in found.splits.names:
        survey.rows_of_split[name] += found.before.state.task_rows(name, schema).num_rows
    job = make_job(schema, options, fitted, survey, types)
    block = rule_of(schema).capacity_block
    tables = tuple(
        replace(table, num_rows=capacity_of(table.num_rows, block))
        if table.name in vocabularies
        else table
        for table in job.features.tables
    )
    return replace(job, features=replace(job.features, tables=tables))


def _write_resets(folder: Path, changes: dict[str, Change]) -> None:
    for table, change in changes.items():
        if len(change.reused):
            path = folder / RESET_FOLDER / f"{table}.parquet"
            path.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"row": change.reused}), path, store_schema=False)


def _report(found: _Next, job: Job) -> dict[str, Any]:
    """Return what is told of the increment, by `gmeta inspect` and in its manifest."""
    look, rule = found.look, rule_of(job.schema)
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
    moved = drift(look, found.moments)
    return {
        "rows": look.num_rows,
        "late": look.num_late,
        "too_late": look.num_dropped,
        "label_mean": statistics_of(look)["label_mean"],
        "tables": tables,
        "drift": moved,
        "alarms": alarms(look, moved, tables, rule, found.clock.unit),
        "inputs": [file._asdict() for file in found.files.recorded],
    }


def _description(
    found: _Next, job: Job, columns: list[str], types: dict[str, pa.DataType]
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
        "time_unit": time_unit(schema, types[schema.time.column]),
        "columns": sorted(columns),
    }
    # From what it begins with, so that the same files make the same stream.
    origin = [body["schema"], [file.xxh3 for file in found.files.recorded]]
    return {"stream": xxhash.xxh3_64_hexdigest(canonical_json(origin)), **body}
