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
from metaio.prepare.schema.schema_file import fingerprint_schema, parse_schema, with_stream_defaults
from metaio.prepare.schema.values import Kind, infer_kind, to_float64
from metaio.stream.chain import FIRST_INCREMENT, list_increment_numbers, open_stream
from metaio.stream.stream_state import StreamState, load_state
from metaio.stream.window import find_time_unit


@dataclass(frozen=True)
class OpenedStream:
    """A stream before its next increment, `number`."""

    root: Path
    schema: Schema
    state: StreamState
    number: int
    parent: str
    # The content of stream.json; None before the first increment.
    description: dict[str, Any] | None

    @property
    def moments(self) -> dict[str, tuple[float, float]] | None:
        """Return the means and deviations frozen by the first increment; None before it."""
        if self.description is None:
            return None
        return {name: (own[0], own[1]) for name, own in self.description["moments"].items()}

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
        return OpenedStream(root, given_schema, StreamState({}), FIRST_INCREMENT, "", None)
    stream = open_stream(str(root))
    own = parse_schema(stream.description["schema"])
    if given_schema is not None and given_schema != own:
        differing = [
            name for name, part in vars(own).items() if getattr(given_schema, name) != part
        ]
        raise DataError(
            f"the schema differs from that of the stream {root} in {', '.join(differing)}: rows "
            "of both would not mean the same. Leave --schema out, or begin a new stream"
        )
    newest = stream.newest
    state, number = load_state(root, newest.number), newest.number + 1
    return OpenedStream(root, own, state, number, newest.fingerprint, stream.description)


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
        if kind != expected[column]:
            raise DataError(
                f"column {column} of input {name} holds {kind} values, in the stream "
                f"{before.root} it holds {expected[column]}. Cast it, or begin a new stream"
            )
