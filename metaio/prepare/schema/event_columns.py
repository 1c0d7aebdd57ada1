"""The [events] of a schema: which raw rows are events, and from when on a row knows them.

Shape suffixes: N rows, E events"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import SchemaError
from metaio.prepare.schema.values import from_ordered_bits
from metaio.ragged import Int64

if TYPE_CHECKING:
    from metaio.prepare.schema.schema import Schema

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True)
class EventClock:
    """How the ticks of a time column relate to seconds, and how late an event is known."""

    delay: int  # in ticks
    seconds_per_tick: float  # 0: ticks are the ordered bits of floats

    @classmethod
    def of(cls, schema: Schema, kind: pa.DataType) -> Self:
        """Return the clock of a schema with [events], by the type of its time column. Raises
        SchemaError: the delay is no duration on that clock."""
        delay = schema.events.delay if schema.events is not None else 0
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
                    f"events.delay is {delay!r}, but column {schema.time and schema.time.column} "
                    "holds numbers, whose unit is not known. Give the delay as a number in its unit"
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

    def seconds(self, tick_E: Int64) -> Any:
        """Return times as float64 seconds [E], or in units of a column of numbers."""
        if not self.seconds_per_tick:
            return from_ordered_bits(tick_E)
        return tick_E * self.seconds_per_tick


def parse_delay(text: str) -> tuple[float, str]:
    """Return number and unit of a duration such as "10m". Raises SchemaError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise SchemaError(
            f"events.delay is {text!r}; a number and one of s, m, h, d is allowed, as in '10m'. "
            "Correct it"
        )
    return float(found[1]), found[2]


class Condition(NamedTuple):
    """A comparison of a raw column with a value."""

    column: str
    comparison: str
    value: float | str


_COMPARISONS = {
    "=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater,
    ">=": pc.greater_equal,
}  # fmt: skip
_CONDITION = re.compile(
    r"""\s*(?:"([^"]+)"|(\w+))\s*(!=|<=|>=|=|<|>)\s*(?:'([^']*)'|(-?\d+(?:\.\d+)?))\s*"""
)


def parse_where(where: str) -> tuple[Condition, ...]:
    """Return the comparisons of `where`, all of which hold for an event. Raises SchemaError."""
    found = []
    for part in re.split(r"\s+and\s+", where, flags=re.IGNORECASE) if where else ():
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise SchemaError(
                f"events.where has {part!r}; comparisons with =, !=, <, <=, > or >= of a column "
                "and a number or a 'text', joined by and, are allowed, as in \"click = 1 and kind "
                "!= 'ad'\". Correct it"
            )
        value = float(match[5]) if match[5] is not None else match[4]
        found.append(Condition(match[1] or match[2], match[3], value))
    return tuple(found)


def find_events(schema: Schema, batch: pa.RecordBatch) -> Any:
    """Return which raw rows are events, as int8 [N, 1]; [N, 0] where all are, or none is asked."""
    conditions = parse_where(schema.events.where) if schema.events is not None else ()
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
