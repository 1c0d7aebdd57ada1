"""The events of each episode: earlier rows of its task, as of the time of each of its rows.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, K dense
columns"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from metaio.ragged import Float32, Ids, Int32, Int64, offsets, ragged_indices

if TYPE_CHECKING:
    from metaio.format.block import Rows
    from metaio.prepare.episodes.encoded_rows import EncodedRows
    from metaio.prepare.schema.event_columns import EventClock
    from metaio.prepare.schema.schema import Schema


class TimedRows(NamedTuple):
    """Rows of complete tasks, as their events are made of them."""

    task_N: npt.NDArray[Any]
    time_N: npt.NDArray[Any]  # ticks or seconds
    tie_N: npt.NDArray[Any]  # orders rows of equal time
    is_event_N: npt.NDArray[np.bool_]
    seconds_N: npt.NDArray[np.float64]
    ids_NM: Ids
    dense_NK: Float32


class EpisodeEvents(NamedTuple):
    """The events of some episodes, and what each of their rows knows."""

    first_T: Int64  # the first event's place in the order of a bucket's events
    num_events_T: Int64
    before_N: Int32
    event_numbers: Float32


class TaskEvents:
    """The events of rows of complete tasks, task by task in time."""

    def __init__(self, rows: TimedRows, delay: float, longest: int) -> None:
        tasks, task_N = np.unique(rows.task_N, return_inverse=True)
        times, rank_N = np.unique(rows.time_N, return_inverse=True)
        events = np.flatnonzero(rows.is_event_N)
        # Equal times are one moment, which no row of it knows: their order is free, but fixed.
        event_order = np.lexsort((rows.tie_N[events], rank_N[events], task_N[events]))
        self._event_rows = events[event_order]
        event_key = (task_N[self._event_rows].astype(np.int64) << 32) | rank_N[self._event_rows]
        # An event is known from `delay` after it on, and never at its own time.
        bound_N = np.searchsorted(times, rows.time_N - delay, side="left")
        self._known_N = np.searchsorted(event_key, (task_N.astype(np.int64) << 32) | bound_N)
        first_N = np.searchsorted(event_key, np.arange(len(tasks), dtype=np.int64) << 32)[task_N]
        self._first_N, self._longest = first_N, longest
        chosen = rows.ids_NM[self._event_rows]
        self.ids_of_columns: list[Ids] = list(np.ascontiguousarray(chosen.T))
        self._event_seconds = rows.seconds_N[self._event_rows]
        self._event_dense = rows.dense_NK[self._event_rows]

    @classmethod
    def of(cls, schema: Schema, rows: EncodedRows, clock: EventClock) -> Self:
        """Return the events of a bucket's rows."""
        rule = schema.events
        assert rule is not None  # a clock is of a schema with [events]
        names, dense = [column.column for column in schema.single], schema.dense_names
        is_event_N = np.ones(rows.num_rows, np.bool_)
        if rows.is_event.shape[1]:
            is_event_N = rows.is_event[:, 0].astype(np.bool_)
        timed = TimedRows(
            rows.task_hash_N,
            rows.time_N,
            rows.row_hash_N,
            is_event_N,
            clock.seconds(rows.time_N),
            rows.ids_NF[:, [names.index(name) for name in rule.columns]],
            rows.dense_NK[:, [dense.index(name) for name in rule.dense]],
        )
        return cls(timed, clock.delay, rule.longest)

    def gather(self, chosen_N: Int64, row_lengths_T: Int64) -> EpisodeEvents:
        """Return the events of episodes with these rows of the bucket, `row_lengths_T` each."""
        known_N, starts_T = self._known_N[chosen_N], offsets(row_lengths_T)[:-1]
        stop_T = np.maximum.reduceat(known_N, starts_T)
        first_T = self._first_N[chosen_N[starts_T]]
        if self._longest:
            # So that even the row that knows least has the newest `longest` before it.
            least_T = np.minimum.reduceat(known_N, starts_T)
            first_T = np.maximum(first_T, least_T - self._longest)
        num_events_T = stop_T - first_T
        event_rows = ragged_indices(first_T, num_events_T)
        before_N = (known_N - np.repeat(first_T, row_lengths_T)).astype(np.int32)
        event_seconds = self._event_seconds[event_rows]
        # Since the first event: 24 bits hold months to the second.
        begins = offsets(num_events_T)[:-1]
        event_seconds -= np.repeat(
            event_seconds[begins[num_events_T > 0]], num_events_T[num_events_T > 0]
        )
        event_numbers = np.concatenate(
            [event_seconds[:, None], self._event_dense[event_rows]], axis=1
        )
        return EpisodeEvents(first_T, num_events_T, before_N, event_numbers.astype(np.float32))

    def add_lists(
        self, rows: Rows, starts_NM: Int64, first_value: int, known: EpisodeEvents
    ) -> tuple[Rows, Int64]:
        """Return the rows, and where their lists begin, with the ids of events in each first row;
        those of all columns stand one after another from `first_value` on."""
        num_columns, num_stored = len(self.ids_of_columns), len(self.ids_of_columns[0])
        first_T = offsets(rows.row_lengths_T)[:-1]
        starts_of_events = np.zeros((len(rows.label_N), num_columns), np.int64)
        lengths_of_events = np.zeros((len(rows.label_N), num_columns), np.int32)
        starts = first_value + num_stored * np.arange(num_columns)
        starts_of_events[first_T] = known.first_T[:, None] + starts
        lengths_of_events[first_T] = known.num_events_T[:, None]
        found = replace(
            rows,
            multi_lengths_NM=np.concatenate([rows.multi_lengths_NM, lengths_of_events], axis=1),
            num_events_T=known.num_events_T,
            event_numbers=known.event_numbers,
            events_before_N=known.before_N,
        )
        return found, np.concatenate([starts_NM, starts_of_events], axis=1)
