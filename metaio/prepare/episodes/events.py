"""The events of each episode: earlier rows of its task, as of the time of each of its rows.

Shape suffixes: T tasks, N rows, E events, C columns of an event's ids, K numbers of an event"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from metaio.ragged import Float32, Ids, Int32, Int64, offsets, ragged_indices

if TYPE_CHECKING:
    from metaio.prepare.episodes.encoded_rows import EncodedRows
    from metaio.prepare.schema.event_columns import EventClock
    from metaio.prepare.schema.schema import Schema


class EpisodeEvents(NamedTuple):
    """The events of some episodes, and what each of their rows knows."""

    first_T: Int64  # the first event's place in the order of a bucket's events
    num_events_T: Int64
    before_N: Int32
    numbers_EK: Float32


class BucketEvents:
    """The events of a bucket's rows, task by task in time."""

    def __init__(self, schema: Schema, rows: EncodedRows, clock: EventClock) -> None:
        assert schema.events is not None
        rule, self._clock = schema.events, clock
        names = [column.column for column in schema.single]
        dense = schema.dense_names
        is_event_N = np.ones(rows.num_rows, np.bool_)
        if rows.event_NE.shape[1]:
            is_event_N = rows.event_NE[:, 0].astype(np.bool_)
        tasks, task_N = np.unique(rows.task_hash_N, return_inverse=True)
        times, rank_N = np.unique(rows.time_N, return_inverse=True)
        event_E = np.flatnonzero(is_event_N)
        # Equal times are one tick, which no row of that tick knows: their order is free, but fixed.
        order_E = np.lexsort((rows.row_hash_N[event_E], rank_N[event_E], task_N[event_E]))
        self._rows_E = event_E[order_E]
        key_E = (task_N[self._rows_E].astype(np.int64) << 32) | rank_N[self._rows_E]
        # An event is known from `delay` after it on, and never at its own time.
        bound_N = np.searchsorted(times, rows.time_N - clock.delay, side="left")
        self._known_N = np.searchsorted(key_E, (task_N.astype(np.int64) << 32) | bound_N)
        first_N = np.searchsorted(key_E, np.arange(len(tasks), dtype=np.int64) << 32)[task_N]
        self._first_N, self._longest = first_N, rule.longest
        chosen = rows.ids_NF[self._rows_E]
        self.ids_CE: list[Ids] = [chosen[:, names.index(name)] for name in rule.columns]
        self._time_E = rows.time_N[self._rows_E]
        self._dense_EK = rows.dense_NK[self._rows_E][:, [dense.index(one) for one in rule.dense]]

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
        rows_E = ragged_indices(first_T, num_events_T)
        before_N = (known_N - np.repeat(first_T, row_lengths_T)).astype(np.int32)
        seconds_E = self._clock.seconds(self._time_E[rows_E])
        # Since the first event: 24 bits hold months to the second.
        begins = offsets(num_events_T)[:-1]
        seconds_E -= np.repeat(seconds_E[begins[num_events_T > 0]], num_events_T[num_events_T > 0])
        numbers_EK = np.concatenate([seconds_E[:, None], self._dense_EK[rows_E]], axis=1)
        return EpisodeEvents(first_T, num_events_T, before_N, numbers_EK.astype(np.float32))
