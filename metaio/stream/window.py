"""Summarises the rows of an increment: its window, the occurrences of values, statistics to judge.

Shape suffixes: N rows, V values"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.hashing import UInt64, splitmix64
from metaio.prepare.episodes.encode import Encoder, hash_tasks
from metaio.prepare.episodes.encoded_rows import EncodedRows
from metaio.prepare.episodes.ordered_map import should_merge
from metaio.prepare.episodes.splits import Splits, assign_splits, count_split_rows
from metaio.prepare.episodes.survey import Moments, add_moments, list_values, measure_moments
from metaio.prepare.schema.label_columns import read_labels
from metaio.prepare.schema.raw_columns import read_dense
from metaio.prepare.schema.rules import StreamRule
from metaio.prepare.schema.schema import LabelColumn, Schema, make_event_schema
from metaio.prepare.schema.values import hash_values, infer_kind, to_float32, to_time_ticks
from metaio.ragged import Int64
from metaio.stream.chain import TICKS_PER_S
from metaio.stream.numbering import Occurrences, merge_occurrences

_DAY_S = 86_400
_TOO_LATE, _DIGITS_LEFT_OUT = "too late", 6


def find_time_unit(schema: Schema, kind: pa.DataType) -> str:
    """Return the unit of a stream's times: us of timestamps, day of dates, else stream.unit."""
    if pa.types.is_timestamp(kind):
        return "us"
    if pa.types.is_date(kind):
        return "day"
    if pa.types.is_integer(kind):
        return find_stream_rule(schema).unit
    raise DataError(
        f"time column {schema.time.column if schema.time else ''} has type {kind}; the windows of "
        "a stream need integers, dates or timestamps. Cast it, or give its format if it is text"
    )


def find_stream_rule(schema: Schema) -> StreamRule:
    """Return the [stream] of a schema, or its defaults."""
    return schema.stream or StreamRule()


@dataclass(frozen=True)
class StreamClock:
    """The durations of a stream in ticks of its time column, and where its window begins."""

    start: int | None  # None: the first increment, in which nothing is late
    late: int
    ttl: int
    grace: int
    unit: str
    delays: tuple[int, ...]  # by label: how old a row must be for it to be final
    is_backfill: bool = False  # all rows are from before `start`, and none is late

    @classmethod
    def of(cls, schema: Schema, unit: str, start: int | None) -> "StreamClock":
        """Return the clock of a stream whose times count in `unit`."""
        rule = find_stream_rule(schema)

        def ticks(seconds: float) -> int:
            return math.floor(seconds / _DAY_S if unit == "day" else seconds * TICKS_PER_S[unit])

        # A ttl below a day, in a column of days, would become 0, which means never.
        ttl = max(ticks(rule.ttl), 1) if rule.ttl else 0
        # Rounded up: no label may be learnt before its time.
        delays = tuple(-ticks(-label.matures_s) for label in schema.labels)
        # A row is corrected as long as its labels wait.
        late = max(ticks(rule.late), *delays)
        return cls(start, late, ttl, ticks(rule.grace), unit, delays)

    def is_kept(self, time_N: Int64) -> npt.NDArray[np.bool_]:
        """Return which rows are not too late for the window."""
        if self.start is None or self.is_backfill:
            return np.ones(len(time_N), np.bool_)
        return time_N >= self.start - self.late

    def is_late(self, time_N: Int64) -> npt.NDArray[np.bool_]:
        """Return which rows are from before the window."""
        if self.start is None or self.is_backfill:
            return np.zeros(len(time_N), np.bool_)
        return time_N < self.start

    @property
    def forget_before(self) -> int | None:
        """Return the time before which rows are forgotten; None if none are."""
        return self.start - self.ttl if self.ttl and self.start is not None else None


@dataclass(frozen=True)
class RowScreen:
    """Decides which rows a window takes; it is sent to every worker of a cluster."""

    schema: Schema
    clock: StreamClock
    ranges: Mapping[str, tuple[float, float]]  # of labels, where a loss takes no others
    latest: int | None = None  # times behind it are of a wrong clock
    ahead: str = ""  # the newest of these
    known: UInt64 | None = None  # keys of rows that the stream has, sorted; see hash_row_keys

    def select(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Int64, Counter[str], int]:
        """Return the rows that the window takes, their times, how many are set aside by reason, and
        how many are too late."""
        assert self.schema.time is not None
        column, set_aside = self.schema.time.column, Counter[str]()
        time_N = to_time_ticks(column, batch[column])

        def keep(right_N: npt.NDArray[np.bool_], why: str) -> None:
            nonlocal batch, time_N
            # Filtering copies all columns, and mostly no row is wrong.
            if not right_N.all():
                set_aside[why] += int((~right_N).sum())
                batch, time_N = batch.filter(pa.array(right_N)), time_N[right_N]

        keep(time_N >= 0, f"time {column} is below 0")
        if self.latest is not None:
            why = f"time {column} is ahead of now or of the other rows, up to {self.ahead}"
            keep(time_N <= self.latest, why)
        # Rows that are too late are counted, and not looked at: they may be of any age.
        keep(self.clock.is_kept(time_N), _TOO_LATE)
        if self.known is not None and self.schema.row_id is not None and batch.num_rows:
            # Counted as those that are too late: the stream has them.
            row_id = batch[self.schema.row_id.column]
            id_N = hash_values(row_id, infer_kind("", row_id.type, "row_id")).view(np.int64)
            key_N = hash_row_keys(hash_tasks(self.schema, batch)[0], id_N)
            place_N = np.minimum(np.searchsorted(self.known, key_N), max(len(self.known) - 1, 0))
            keep(self.known[place_N] != key_N, _TOO_LATE)
        num_labels = len(self.schema.labels)
        for label in self.schema.labels:
            keep(_find_known_labels(label, batch), f"label {label.column} is null or no number")
        for at, label in enumerate(self.schema.labels):
            if label.column in self.ranges:
                least, most = self.ranges[label.column]
                label_N = read_labels(self.schema, batch).reshape(len(time_N), num_labels)[:, at]
                wrong_N = (label_N < least) | (label_N > most)  # NaN: not known
                keep(~wrong_N, f"label {label.column} is not from {least:g} to {most:g}")
        return batch, time_N, set_aside, set_aside.pop(_TOO_LATE, 0)


def hash_row_keys(task_hash_N: UInt64, row_id_N: Int64) -> UInt64:
    """Return a key of each row by its task and [row_id]."""
    return splitmix64(task_hash_N + splitmix64(row_id_N.view(np.uint64)))


def _find_known_labels(rule: LabelColumn, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return the rows whose label is a finite number, or need not be known."""
    column = batch[rule.column]
    fine = column.is_valid()
    if pa.types.is_floating(column.type):
        fine = pc.fill_null(pc.is_finite(column), fill_value=False)
        if rule.null == "unknown":
            fine = pc.or_(fine, column.is_null())
    elif rule.null == "unknown":
        return np.ones(len(column), np.bool_)
    if rule.mask is not None:
        mask = batch[rule.mask]
        # A mask that is neither 0 nor 1 is found when labels are read.
        fine = pc.or_(fine, pc.fill_null(pc.equal(mask.cast(pa.float64()), 0.0), fill_value=False))
    return np.asarray(fine.to_numpy(zero_copy_only=False), np.bool_)


@dataclass
class WindowSummary:
    """What the rows of an increment hold, late ones that the window takes included."""

    num_read: int = 0  # rows of the inputs, as the engine counted them
    num_rows: int = 0
    num_late: int = 0  # of them
    num_dropped: int = 0  # too late
    num_known: int = 0  # of a backfill, rows that the stream has
    set_aside: Counter[str] = field(default_factory=Counter)  # by reason
    times: Counter[int] = field(default_factory=Counter)  # see count_times
    least_time: int = np.iinfo(np.int64).max
    most_time: int = np.iinfo(np.int64).min
    label_sum: float = 0.0
    label_squares: float = 0.0
    rows_of_split: Counter[str] = field(default_factory=Counter)
    nulls: Counter[str] = field(default_factory=Counter)
    moments: dict[str, Moments] = field(default_factory=dict)
    occurrences: dict[str, list[Occurrences]] = field(default_factory=dict)  # by table
    events_of_split: Counter[str] = field(default_factory=Counter)  # of [events] files

    def add(self, other: "WindowSummary", admissions: dict[str, int]) -> None:
        """Add what other rows hold."""
        for name in ("num_rows", "num_late", "num_dropped", "label_sum", "label_squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.least_time = min(self.least_time, other.least_time)
        self.most_time = max(self.most_time, other.most_time)
        self.set_aside.update(other.set_aside)
        self.times.update(other.times)
        self.rows_of_split.update(other.rows_of_split)
        self.events_of_split.update(other.events_of_split)
        self.nulls.update(other.nulls)
        add_moments(self.moments, other.moments)
        for table, parts in other.occurrences.items():
            known = self.occurrences.setdefault(table, [])
            known.extend(parts)
            if should_merge([len(part.values) for part in known]):
                self.occurrences[table] = [merge_occurrences(known, admissions[table])]


@dataclass(frozen=True)
class SummaryContext:
    """What summarising needs; it is sent to every worker of a cluster."""

    schema: Schema
    splits: Splits
    screen: RowScreen
    value_types: dict[str, pa.DataType]  # of each table's values
    is_dated: bool  # whether times are timestamps or dates, not integers

    @property
    def admissions(self) -> dict[str, int]:
        """Return how many occurrences admit a value in each table."""
        sparse = self.schema.sparse
        return {c.table_name: c.vocabulary for c in sparse if c.vocabulary is not None}


def summarise_batch(context: SummaryContext, batch: pa.RecordBatch) -> WindowSummary:
    """Return what a batch holds; raise DataError for values that make no sense, such as NaN."""
    schema, splits, clock = context.schema, context.splits, context.screen.clock
    batch, time_N, set_aside, num_dropped = context.screen.select(batch)
    found = WindowSummary(num_rows=batch.num_rows, num_dropped=num_dropped, set_aside=set_aside)
    if not found.num_rows:
        return found
    found.num_late = int(clock.is_late(time_N).sum())
    found.least_time, found.most_time = int(time_N.min()), int(time_N.max())
    found.times = count_times(time_N)
    # The first label alone; unknown ones count as 0, in every window alike.
    label_N = read_labels(schema, batch).reshape(found.num_rows, -1)[:, 0].astype(np.float64)
    label_N = np.nan_to_num(label_N)
    found.label_sum, found.label_squares = float(label_N.sum()), float((label_N**2).sum())
    found.nulls = Counter({name: batch[name].null_count for name in batch.schema.names})
    task_hash_N, _ = hash_tasks(schema, batch)
    split_N = assign_splits(schema, splits, batch, task_hash_N)
    found.rows_of_split = count_split_rows(splits, split_N)
    # Fitted to training rows alone: the gate is there to judge the model.
    # The splits of a stream are train (0) and gate (1).
    in_train = split_N == 0
    if any(clock.delays):
        in_train &= ~clock.is_late(time_N)  # those that correct a row are no more occurrences
    train, train_time_N = batch.filter(pa.array(in_train)), time_N[in_train]
    found.moments = measure_moments(schema, train)
    found.occurrences = _find_occurrences(context, schema, train, train_time_N)
    return found


def summarise_events(context: SummaryContext, batch: pa.RecordBatch) -> WindowSummary:
    """Return how many events of a batch of another log each split has, and the occurrences of the
    values of training tasks; raise DataError for numbers that make no sense, such as NaN."""
    schema = make_event_schema(context.schema)
    task_hash_N, _ = hash_tasks(schema, batch)
    split_N = assign_splits(schema, context.splits, batch, task_hash_N)
    for dense in schema.dense:
        numbers = read_dense(dense, batch[dense.column].drop_null())
        to_float32(dense.column, numbers, "dense")
    assert schema.time is not None
    time_N = to_time_ticks(schema.time.column, batch[schema.time.column])
    train = batch.filter(pa.array(split_N == 0))
    occurrences = _find_occurrences(context, schema, train, time_N[split_N == 0])
    events_of_split = count_split_rows(context.splits, split_N)
    return WindowSummary(occurrences=occurrences, events_of_split=events_of_split)


def _find_occurrences(
    context: SummaryContext, schema: Schema, train: pa.RecordBatch, time_N: Int64
) -> dict[str, list[Occurrences]]:
    found: dict[str, list[Occurrences]] = {}
    for column in schema.sparse:
        if column.vocabulary is not None:
            values, rows_V = list_values(schema, column, train)
            values = values.cast(context.value_types[column.table_name])
            own = Occurrences.of(values, time_N[rows_V], column.vocabulary)
            found.setdefault(column.table_name, []).append(own)
    return found


def count_times(time_N: Int64) -> Counter[int]:
    """Return how many times from 0 on are in each span of `find_span_starts`."""
    # Of a float32's 24 digits 18: spans of two hours today in every unit, so that they are few.
    spans, counts = np.unique(
        time_N.astype(np.float32).view(np.int32) >> _DIGITS_LEFT_OUT, return_counts=True
    )
    return Counter(dict(zip(spans.tolist(), counts.tolist(), strict=True)))


def find_span_starts(spans: list[int]) -> list[float]:
    """Return the first time of each span that `count_times` counts by."""
    bits = np.array(spans, np.int32) << _DIGITS_LEFT_OUT
    starts: list[float] = bits.view(np.float32).tolist()
    return starts


def encode_window_rows(encoder: Encoder, screen: RowScreen, batch: pa.RecordBatch) -> EncodedRows:
    """Return the rows of a batch that the window takes."""
    return encoder.encode(screen.select(batch)[0])
