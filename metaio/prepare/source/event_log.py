"""Opens the log that [events] files names, and compares its columns with those of the rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from metaio.errors import DataError
from metaio.prepare.schema.schema import Schema, make_event_schema
from metaio.prepare.schema.values import infer_kind
from metaio.prepare.source.source import DuckSource

EventBatches = Callable[[], Iterator[pa.RecordBatch]]


@contextmanager
def open_event_log(
    schema: Schema,
    names: list[str],
    types: dict[str, pa.DataType],
    *,
    memory_bytes: int,
    threads: int,
) -> Iterator[EventBatches]:
    """Yield what reads the events of these files, whose tasks and times are as those of a log with
    these types; without files there are none. Raises DataError: a column is missing, of another
    type, or has nulls."""
    if not names:
        yield lambda: iter(())
        return
    own = make_event_schema(schema)
    with DuckSource(names, own, memory_bytes=memory_bytes, threads=threads) as source:
        check_event_types(schema, types, source.arrow_types(own.columns))
        source.survey()
        yield partial(source.batches, own.columns)


def check_event_types(
    schema: Schema, types: dict[str, pa.DataType], found: dict[str, pa.DataType]
) -> None:
    """Raise DataError where tasks, times or ids of events would never equal those of the rows."""
    assert schema.time is not None
    time = schema.time.column
    for column in (schema.task.column, time, *(schema.events.columns if schema.events else ())):
        ours, theirs = (
            _describe_time(one[column]) if column == time else infer_kind(column, one[column], role)
            for one, role in ((types, "log"), (found, "[events] files"))
        )
        if ours != theirs:
            raise DataError(
                f"column {column} of the files of [events] holds {theirs}, and {ours} in the log: "
                "none would be equal. Cast one of them"
            )


def _describe_time(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "timestamps" if kind.tz is None else "timestamps of a zone"
    if pa.types.is_integer(kind):
        return "integers"
    return "floats" if pa.types.is_floating(kind) else str(kind)
