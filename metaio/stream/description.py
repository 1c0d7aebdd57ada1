"""A stream before an increment is added: its schema, its state, and what its columns hold."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from metaio.errors import DataError
from metaio.format.layout import MANIFEST_NAME
from metaio.prepare.job import infer_column_kind
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_changes import apply_changes
from metaio.prepare.schema.schema_file import fingerprint_schema, parse_schema, with_stream_defaults
from metaio.prepare.schema.values import Kind, infer_kind, to_float64
from metaio.stream.chain import FIRST_INCREMENT, list_increment_numbers, open_stream
from metaio.stream.stream_state import StreamState, load_state
from metaio.stream.window import find_stream_rule, find_time_unit

_SQL_TYPES = {"integer": "BIGINT", "text": "VARCHAR"}


@dataclass(frozen=True)
class OpenedStream:
    """A stream before its next increment, `number`."""

    root: Path
    schema: Schema
    state: StreamState
    number: int
    parent: str
    # The content of stream.json, with what the newest increment says of columns that joined; None
    # before the first increment.
    description: dict[str, Any] | None
    stored: Schema  # of the increment before, by which the state's rows are encoded

    @property
    def moments(self) -> dict[str, tuple[float, float]]:
        """Return the means and deviations that earlier increments froze."""
        known = {} if self.description is None else self.description["moments"]
        return {name: (own[0], own[1]) for name, own in known.items()}

    @property
    def mark(self) -> str:
        """Return the mark of the schema before the first increment; "" once it cannot change."""
        return fingerprint_schema(self.schema) if self.description is None else ""


def open_for_extension(root: Path, schema: Schema | None) -> OpenedStream:
    """Return the stream at a folder, or a new one to be made there."""
    # With defaults, as stream.json has it: only real differences are refused.
    given_schema = None if schema is None else with_stream_defaults(schema)
    if (root / MANIFEST_NAME).exists():
        raise DataError(
            f"{root} holds a dataset, which cannot be extended. Begin a stream at another place"
        )
    numbers = list_increment_numbers(str(root))
    if not numbers:
        if given_schema is None:
            raise DataError(
                f"{root} holds no stream yet, and no schema is given: the first increment needs "
                "it. Pass --schema"
            )
        empty = StreamState({})
        return OpenedStream(root, given_schema, empty, FIRST_INCREMENT, "", None, given_schema)
    stream = open_stream(str(root))
    newest, recipe = stream.newest, stream.newest_recipe
    own = parse_schema(recipe["schema"])
    description = {**stream.description, "moments": recipe["moments"]}
    description["kinds"] = {**recipe["kinds"], **stream.description["kinds"]}
    schema = own if given_schema in (None, own) else apply_changes(own, given_schema, str(root))
    state, number = load_state(root, newest.number), newest.number + 1
    return OpenedStream(root, schema, state, number, newest.fingerprint, description, own)


def choose_fill_types(before: OpenedStream) -> dict[str, str] | None:
    """Return the SQL type of each column that files may lack, as its null is known; None: the
    stream takes no such file."""
    schema, description = before.schema, before.description
    if find_stream_rule(schema).missing != "fill" or description is None or schema.transform:
        return None
    kinds = description["kinds"]
    sql_types = {
        c.column: _SQL_TYPES[kinds[c.column]] for c in schema.sparse if c.null == "unknown"
    }
    for column in schema.multi:
        if column.column in sql_types and column.separator is None:
            sql_types[column.column] += "[]"
    sql_types |= {c.column: "DOUBLE" for c in schema.dense if c.fill is not None}
    sql_types |= {c.column: "DOUBLE[]" for c in schema.vector if c.fill is not None}
    # What decides where a row belongs, or what it teaches, has no null that says so.
    parts = (schema.task, schema.time, schema.row_id)
    fixed = {part.column for part in parts if part is not None}
    fixed |= {*schema.label_columns, *schema.event_conditions}
    return {column: kind for column, kind in sql_types.items() if column not in fixed}


def infer_column_kinds(schema: Schema, types: dict[str, pa.DataType]) -> dict[str, Kind]:
    """Return whether each sparse column holds integers or text."""
    return {c.column: infer_column_kind(c, types[c.column]) for c in schema.sparse}


def check_columns(
    before: OpenedStream,
    name: str,
    types: dict[str, pa.DataType],
    distinct: Callable[[str], Iterable[str | None]],
) -> None:
    """Raise DataError for a column of input `name` that does not hold what it held before."""
    description, schema = before.description, before.schema
    if description is None:
        return
    found: dict[str, str] = dict(infer_column_kinds(schema, types))
    expected: dict[str, str] = dict(description["kinds"])
    task = schema.task.column
    as_kind = {"integer": "integer", "hashed": "text"}
    found[task] = infer_kind(task, types[task], "task")
    expected[task] = as_kind[description["task_kind"]]
    assert schema.time is not None
    time = schema.time.column
    # The time may also be a feature: its kind is compared then.
    if time not in found:
        found[time] = find_time_unit(schema, types[time])
        expected[time] = description["time_unit"]
        # Integers may count microseconds, too, and yet are no timestamps.
        if pa.types.is_integer(types[time]) != ("int" in description["time_type"]):
            found[time], expected[time] = str(types[time]), description["time_type"]
    numbers = [(one.column, "dense") for one in schema.dense]
    for column, role in [*numbers, *((one.column, "label") for one in schema.labels)]:
        if pa.types.is_null(types[column]):
            continue
        try:
            # On no values: this checks the type alone.
            to_float64(column, pa.nulls(0, types[column]), role)
        except DataError:
            if any(distinct(column)):  # in CSV a column without a value is text
                raise
    for column, kind in found.items():
        if kind != expected.get(column, kind):
            raise DataError(
                f"column {column} of input {name} holds {kind} values, in the stream "
                f"{before.root} it holds {expected[column]}. Cast it, or begin a new stream"
            )
