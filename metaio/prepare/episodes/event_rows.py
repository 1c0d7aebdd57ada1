"""Rows of the log that [events] files names: events of tasks, and in no episode.

Shape suffixes: N rows, F single-id or pooled features, V values, K dense columns"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa

from metaio.prepare.episodes.encode import Encoder, hash_rows
from metaio.prepare.episodes.encoded_rows import (
    EncodedRows,
    fill_columns,
    list_array_types,
    select_rows,
)
from metaio.prepare.episodes.splits import Splits, assign_splits
from metaio.prepare.episodes.survey import Survey, survey_batch
from metaio.prepare.schema.schema import Schema, make_event_schema
from metaio.prepare.schema.side_columns import EVENT_ONLY


def survey_events(schema: Schema, batch: pa.RecordBatch, splits: Splits) -> Survey:
    """Return how many events each split has, and the values of those of the train split; of none
    where a column deals rows to splits, since events have no such column."""
    found = survey_batch(make_event_schema(schema), batch, splits)
    counts, events = found.counts, found.rows_of_split
    if schema.splits.column is not None:
        counts, events = {}, Counter(dict.fromkeys(splits.names, batch.num_rows))
    # Means are of rows, and the raw ids those of their tasks.
    return Survey(counts=counts, events_of_split=events)


class EventRowEncoder:
    """Encodes events as rows of the schema whose other columns are 0."""

    def __init__(self, encoder: Encoder) -> None:
        self._schema, self._splits = encoder.schema, encoder.fitted.splits
        self._encoder = encoder.with_schema(make_event_schema(encoder.schema))

    def encode(self, batch: pa.RecordBatch) -> EncodedRows:
        """Return the events of a batch with the split of their task, or once for each split where
        a column deals rows; raise DataError for values that break the schema."""
        schema, own = self._schema, self._encoder.schema
        known, num_rows = self._encoder.encode(batch, with_label=False), batch.num_rows
        types = list_array_types(schema).items()
        found = EncodedRows(
            **{
                name: np.zeros(num_rows if width is None else (num_rows, width), dtype)
                for name, (dtype, width) in types
            }
        )
        found = replace(found, values_V=found.values_V[:0])
        fill_columns(schema, own, known, found.ids_NF, found.dense_NK)
        found.side_NS[:], found.is_event[:] = EVENT_ONLY, 1
        found.split_N[:] = assign_splits(own, self._splits, batch, known.task_hash_N)
        # Events of one task and moment in an order that no order of the files changes.
        seed_N = np.full(num_rows, schema.seed, np.uint64)
        row_hash_N = hash_rows(seed_N, known.ids_NF, known.dense_NK.view(np.uint32))
        found = replace(
            found,
            task_hash_N=known.task_hash_N,
            task_N=known.task_N,
            time_N=known.time_N,
            row_hash_N=row_hash_N,
        )
        if known.is_event.shape[1]:
            found = select_rows(found, np.flatnonzero(known.is_event[:, 0]))
        if schema.splits.column is None:
            return found
        copies = len(self._splits.names)
        chosen = np.tile(np.arange(found.num_rows), copies)
        split_N = np.repeat(np.arange(copies, dtype=np.int32), found.num_rows)
        return replace(select_rows(found, chosen), split_N=split_N)
