"""The [events] of a schema: which raw rows are events, and from when on a row knows them.

Shape suffix: N rows"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import SchemaError
from metaio.prepare.schema.conditions import parse_delay, parse_where
from metaio.prepare.schema.rules import EventsRule
from metaio.prepare.schema.values import from_ordered_bits
from metaio.ragged import Int64

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True)
class EventClock:
    """How the ticks of a time column relate to seconds, and how late an event is known."""

    delay: int  # in ticks
    seconds_per_tick: float  # 0: ticks are the ordered bits of floats

    @classmethod
    def of(cls, rule: EventsRule, time: str, kind: pa.DataType) -> Self:
        """Return the clock of [events], by the name and type of the time column. Raises
        SchemaError: the delay is no duration on that clock."""
        delay = rule.delay
        seconds_per_tick = 1.0
        if pa.types.is_timestamp(kind):
            seconds_per_tick = 1e-6
        elif pa.types.is_date(kind):
            seconds_per_tick = 86_400.0
        elif pa.types.is_floating(kind):
            seconds_per_tick = 0.0
        if isinstance(delay, str):
            number, unit = parse_delay(delay)
            if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
                raise SchemaError(
                    f"events.delay is {delay!r}, but column {time} holds "
                    "numbers, whose unit is not known. Give the delay as a number in its unit"
                )
            ticks = number * _UNITS_S[unit] / seconds_per_tick
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


_COMPARISONS = {
    "=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater,
    ">=": pc.greater_equal,
}  # fmt: skip


def find_events(rule: EventsRule | None, batch: pa.RecordBatch) -> Any:
    """Return which raw rows are events, as int8 [N, 1]; [N, 0] where all are, or none is asked."""
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
