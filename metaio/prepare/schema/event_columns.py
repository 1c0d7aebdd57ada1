"""The [events] of a schema: which raw rows are events, and from when on a row knows them.

Shape suffix: N rows"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError, SchemaError
from metaio.prepare.schema.conditions import parse_duration_s, parse_where
from metaio.prepare.schema.rules import EventsRule
from metaio.prepare.schema.schema import Schema, TimeColumn
from metaio.prepare.schema.values import from_ordered_bits, infer_kind, to_time_ticks
from metaio.quantities import format_count
from metaio.ragged import Int64


@dataclass(frozen=True)
class EventClock:
    """How the ticks of a time column relate to seconds, and how late an event is known."""

    delay: int  # in ticks
    seconds_per_tick: float  # 0: ticks are the ordered bits of floats

    @classmethod
    def of(cls, rule: EventsRule, time: str, kind: pa.DataType) -> Self:
        """Return the clock of [events], by the name and type of the time column. Raises
        SchemaError: the delay is no duration on that clock."""
        delay, seconds_per_tick = rule.delay, _find_seconds_per_tick(kind)
        if isinstance(delay, str):
            if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
                raise SchemaError(
                    f"events.delay is {delay!r}, but column {time} holds "
                    "numbers, whose unit is not known. Give the delay as a number in its unit"
                )
            ticks = parse_duration_s("events.delay", delay) / seconds_per_tick
        else:
            # Of a timestamp a number is seconds; else it is in units of the column.
            ticks = delay / seconds_per_tick if pa.types.is_timestamp(kind) else delay
        if ticks != int(ticks) or (ticks and not seconds_per_tick):
            raise SchemaError(
                f"events.delay is {delay!r}, which is no whole number of ticks of the time column "
                f"({kind}). Round it, or cast the column to a timestamp or to integers"
            )
        return cls(int(ticks), seconds_per_tick)

    def seconds(self, ticks: Int64) -> Any:
        """Return times as float64 seconds [E], or in units of a column of numbers."""
        if not self.seconds_per_tick:
            return from_ordered_bits(ticks)
        return ticks * self.seconds_per_tick


def _find_seconds_per_tick(kind: pa.DataType) -> float:
    if pa.types.is_timestamp(kind):
        return 1e-6
    if pa.types.is_date(kind):
        return 86_400.0
    return 0.0 if pa.types.is_floating(kind) else 1.0


def read_event_times(time: TimeColumn, column: pa.Array) -> Any:
    """Return the times of rows as float64 seconds [N], of a column of numbers in its units; text is
    read by the format, or as ISO 8601. Raises DataError: a row without a time."""
    if column.null_count:
        raise DataError(
            f"time column {time.column} has {format_count(column.null_count, 'null')}; each "
            "support row needs a time, as it may be an event. Fill it in, or leave the row out"
        )
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        try:
            column = (
                column.cast(pa.timestamp("us"))
                if time.format is None
                else pc.strptime(column, time.format, "us")
            )
        except pa.ArrowInvalid as error:
            raise DataError(
                f"time column {time.column} holds text that is no time by "
                f"{time.format or 'ISO 8601'}: {error}. Correct it, or send numbers"
            ) from error
    clock = EventClock(0, _find_seconds_per_tick(column.type))
    return clock.seconds(to_time_ticks(time.column, column))


_COMPARISONS = {
    "=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater,
    ">=": pc.greater_equal,
}  # fmt: skip


def find_events(rule: EventsRule | None, batch: pa.RecordBatch) -> Any:
    """Return which raw rows are events, as int8 [N, 1]; [N, 0] where all are, or none is asked. Of
    a log beside that of the events no row is one."""
    if rule is not None and rule.files:
        return np.zeros((batch.num_rows, 1), np.int8)
    conditions = parse_where(rule.where) if rule is not None else ()
    if not conditions:
        return np.zeros((batch.num_rows, 0), np.int8)
    is_event_N = np.ones(batch.num_rows, np.bool_)
    for column, comparison, value in conditions:
        kind = batch[column].type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if pa.types.is_null(kind):
            return np.zeros((batch.num_rows, 1), np.int8)
        if is_text != isinstance(value, str):
            raise SchemaError(
                f"events.where compares column {column}, of type {kind}, with {value!r}. Compare a "
                "text with a text in quotes, and a number with a number"
            )
        values = batch[column] if is_text else batch[column].cast(pa.float64())
        holds = _COMPARISONS[comparison](values, value)
        # Null is no event, as a condition in SQL has it.
        is_event_N &= np.asarray(pc.fill_null(holds, fill_value=False))
    return is_event_N.astype(np.int8)[:, None]


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
