"""Gathers the rows of episodes, and their negatives, from a bucket.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, L labels"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from metaio.format.block import Rows
from metaio.prepare.episodes.encoded_rows import EncodedRows, find_value_starts
from metaio.prepare.schema.side_columns import QUERY
from metaio.ragged import Float32, Int64, offsets, places, ragged_indices

if TYPE_CHECKING:
    from metaio.prepare.episodes.events import TaskEvents

    # Which negatives are drawn is the business of whoever makes the sampler.
    from metaio.prepare.episodes.negatives import NegativeSampler

# The row id of a negative: the raw data has no such row.
NO_RAW_ROW = -1


class BucketEpisodes:
    """Episodes of a bucket's rows, in order; with a sampler, negatives follow their positive."""

    def __init__(
        self,
        rows: EncodedRows,
        order_N: Int64,
        row_lengths_T: Int64,
        support_lengths_T: Int64,
        sampler: NegativeSampler | None = None,
        events: TaskEvents | None = None,
    ) -> None:
        self._rows = rows
        self._order_N = order_N
        self._row_offsets_T1 = offsets(row_lengths_T)
        self._sampler = sampler
        self._events = events
        self._value_starts_NM, self._values_V = find_value_starts(rows), rows.values_V
        self.row_lengths_T, self._support_lengths_T = row_lengths_T, support_lengths_T
        # Labels that support rows of the query side do not show: a stream's, which are not final.
        self.hidden: tuple[int, ...] = ()
        if sampler is not None:
            # The lists of drawn items are appended to those of the rows: one gather takes from
            # both.
            self._values_V = np.concatenate([rows.values_V, sampler.catalogue.rows.values_V])
            added = offsets(sampler.count_negatives(order_N))
            first, ends = self._row_offsets_T1[:-1], self._row_offsets_T1[1:]
            self.row_lengths_T = row_lengths_T + added[ends] - added[first]
            in_support = added[first + support_lengths_T] - added[first]
            self._support_lengths_T = support_lengths_T + in_support
        # So do the ids of events, column by column.
        self._first_event_value = len(self._values_V)
        if events is not None:
            self._values_V = np.concatenate([self._values_V, *events.ids_of_columns])

    def count_side(self, side: int) -> int:
        """Return how many rows of the episodes are of a side that the bucket's rows were given."""
        return int((self._rows.side_NS[self._order_N] == side).sum())

    def gather(self, first: int, stop: int) -> Rows:
        """Return episodes [first, stop), each array gathered once from the bucket."""
        # A part at a time: a sorted bucket would be a second copy of it in memory.
        begin, end = self._row_offsets_T1[[first, stop]].tolist()
        chosen_N = self._order_N[begin:end]
        rows, sampler = self._rows, self._sampler
        task_T = rows.task_N[self._order_N[self._row_offsets_T1[first:stop]]]
        items_N: Int64 | None = None
        if sampler is not None:
            chosen_N, items_N = _insert_negatives(sampler, chosen_N)
        lengths_NM = np.take(rows.lengths_NM, chosen_N, axis=0)
        starts_NM = np.take(self._value_starts_NM, chosen_N, axis=0)
        row_lengths_T, events = self.row_lengths_T[first:stop], self._events
        gathered = Rows(
            task_T=task_T,
            row_lengths_T=row_lengths_T,
            support_lengths_T=self._support_lengths_T[first:stop],
            label_N=self._show_labels(chosen_N, row_lengths_T, self._support_lengths_T[first:stop]),
            dense_NK=np.take(rows.dense_NK, chosen_N, axis=0),
            ids_NF=np.take(rows.ids_NF, chosen_N, axis=0),
            multi_ids_V=rows.values_V[:0],
            multi_lengths_NM=lengths_NM,
            row_id_N=np.take(rows.row_id_NR, chosen_N, axis=0).ravel(),
            weight_N=np.take(rows.weight_NW, chosen_N, axis=0).ravel(),
        )
        if sampler is not None and items_N is not None:
            _write_items(gathered, starts_NM, sampler, items_N, len(rows.values_V))
        if events is not None and stop > first:
            known = events.gather(chosen_N, row_lengths_T)
            gathered, starts_NM = events.add_lists(
                gathered, starts_NM, self._first_event_value, known
            )
            lengths_NM = gathered.multi_lengths_NM
        values = ragged_indices(starts_NM.ravel(), lengths_NM.ravel().astype(np.int64))
        return replace(gathered, multi_ids_V=self._values_V[values])

    def _show_labels(
        self, chosen_N: Int64, row_lengths_T: Int64, support_lengths_T: Int64
    ) -> Float32:
        label_N = self._rows.label_N[chosen_N]
        if self.hidden:
            is_support_N = places(row_lengths_T) < np.repeat(support_lengths_T, row_lengths_T)
            is_hidden_N = is_support_N & (self._rows.side_NS[chosen_N, 0] == QUERY)
            label_NL = label_N.reshape(len(label_N), -1)  # a view
            label_NL[np.ix_(is_hidden_N, np.array(self.hidden))] = np.nan
        return label_N


def _insert_negatives(sampler: NegativeSampler, chosen: Int64) -> tuple[Int64, Int64]:
    """Return the row behind each episode row, and the item that replaces its own (-1: none)."""
    # Each row once, and a positive once more for each of its negatives.
    repeats = 1 + sampler.count_negatives(chosen)
    items_N = np.full(int(repeats.sum()), -1, dtype=np.int64)
    is_negative = np.ones(len(items_N), np.bool_)
    is_negative[offsets(repeats)[:-1]] = False
    items_N[is_negative] = sampler.draw(chosen).ravel()
    return np.repeat(chosen, repeats), items_N


def _write_items(
    rows: Rows, starts_NM: Int64, sampler: NegativeSampler, items_N: Int64, first_value: int
) -> None:
    """Turn rows that get an item into negatives: the item's columns, label 0."""
    negative = np.flatnonzero(items_N >= 0)
    items, known = items_N[negative], sampler.catalogue.rows
    rows.label_N[negative] = 0.0
    if rows.row_id_N.size:
        rows.row_id_N[negative] = NO_RAW_ROW
    for index in sampler.columns.single:
        rows.ids_NF[negative, index] = known.ids_NF[items, index]
    for index in sampler.columns.dense:
        rows.dense_NK[negative, index] = known.dense_NK[items, index]
    # Lists of the catalogue begin behind those of the rows, at `first_value`.
    starts_of_item = find_value_starts(known)
    for index in sampler.columns.multi:
        rows.multi_lengths_NM[negative, index] = known.lengths_NM[items, index]
        starts_NM[negative, index] = first_value + starts_of_item[items, index]
