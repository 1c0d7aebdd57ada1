"""Encoded rows, ids and numbers in NumPy arrays: split, chosen and joined.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns, T tasks"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from metaio.format.features import Features
from metaio.ragged import Float32, Int64, index_entries, offsets, sum_rows

IS_EVENT, EVENT_ALONE = 1.0, 2.0


@dataclass(frozen=True)
class EncodedColumns:
    """Rows as ids and numbers. Labels are [N, labels] of several, NaN where one is not known."""

    # take_rows, join_rows and the spool files of bulk/ go by the order of these fields.
    task_N: Int64
    label_N: Float32
    ids_NF: npt.NDArray[np.integer[Any]]
    dense_NK: Float32
    lengths_NM: npt.NDArray[np.int32]
    # Row by row and, within a row, feature by feature.
    values_V: npt.NDArray[np.integer[Any]]
    # W is 1 where rows have weights, else 0.
    weight_NW: Float32
    # Of a model that reads events: seconds, and whether the row is one (IS_EVENT), or nothing else
    # (EVENT_ALONE, among support rows: it has no label); else no columns.
    event_times: npt.NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        """Return N."""
        return len(self.label_N)

    @property
    def is_alone_N(self) -> npt.NDArray[np.bool_]:
        """Return which rows are events alone."""
        is_alone_N: npt.NDArray[np.bool_] = (self.event_times == EVENT_ALONE)[:, 1:].any(axis=1)
        return is_alone_N


def split_rows(rows: EncodedColumns, lengths: Sequence[int]) -> list[EncodedColumns]:
    """Return consecutive stretches of `lengths` rows, as views."""
    value_ends = offsets(sum_rows(rows.lengths_NM))
    parts = []
    for first, stop in pairwise(np.cumsum([0, *lengths]).tolist()):
        arrays = {name: array[first:stop] for name, array in vars(rows).items()}
        arrays["values_V"] = rows.values_V[value_ends[first] : value_ends[stop]]
        parts.append(EncodedColumns(**arrays))
    return parts


def count_labelled(rows: EncodedColumns, lengths: Sequence[int]) -> list[int]:
    """Return how many of consecutive stretches of `lengths` rows are no events alone."""
    ends = offsets(lengths)
    counts: list[int] = np.diff(offsets(~rows.is_alone_N)[ends]).tolist()
    return counts


def take_rows(rows: EncodedColumns, chosen: Int64) -> EncodedColumns:
    """Return the chosen rows, in the order chosen."""
    # Values are ragged: chosen rows have values at places of their own.
    values = index_entries(offsets(sum_rows(rows.lengths_NM)), chosen)
    arrays = {name: array[chosen] for name, array in vars(rows).items() if name != "values_V"}
    return EncodedColumns(**arrays, values_V=rows.values_V[values])


def find_shared_bags(lengths: Sequence[int], shared_TM: npt.NDArray[np.bool_]) -> Int64:
    """Return which list [N, M], counted row by row, each row of the tasks reads: its own, or that
    of its task's first row where the task's rows share it."""
    first_N = np.repeat(offsets(lengths)[:-1], lengths)
    own_N = np.arange(len(first_N))
    shared_NM = np.repeat(shared_TM, lengths, axis=0)
    row_NM: Int64 = np.where(shared_NM, first_N[:, np.newaxis], own_N[:, np.newaxis])
    bag_NM: Int64 = row_NM * shared_TM.shape[1] + np.arange(shared_TM.shape[1])
    return bag_NM


def copy_shared_lists(rows: EncodedColumns, bag_NM: Int64) -> EncodedColumns:
    """Return the rows, each with a copy of every list that it reads."""
    values = index_entries(offsets(rows.lengths_NM.ravel()), bag_NM.ravel())
    lengths_NM = rows.lengths_NM.ravel()[bag_NM]
    return replace(rows, lengths_NM=lengths_NM, values_V=rows.values_V[values])


def join_rows(parts: Sequence[EncodedColumns]) -> EncodedColumns:
    """Return the rows one part after the other."""
    # np.concatenate would copy the only part.
    if len(parts) == 1:
        return parts[0]
    arrays = (np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0]))
    return EncodedColumns(*arrays)


def empty_rows(features: Features, num_rows: int = 0) -> EncodedColumns:
    """Return rows with these features, all of them 0 or empty."""
    return EncodedColumns(
        np.zeros(num_rows, np.int64),
        np.zeros(labels_shape(features, num_rows), np.float32),
        np.zeros((num_rows, len(features.single)), np.int64),
        np.zeros((num_rows, len(features.dense)), np.float32),
        np.zeros((num_rows, len(features.multi)), np.int32),
        np.zeros(0, np.int64),
        np.zeros((num_rows, int(bool(features.weight))), np.float32),
        no_events(features, num_rows),
    )


def no_events(features: Features, num_rows: int) -> npt.NDArray[np.float64]:
    """Return the `event_times` of rows that are no events."""
    return np.zeros((num_rows, 2 * bool(features.events)), np.float64)


def labels_shape(features: Features, num_rows: int) -> tuple[int, ...]:
    """Return the shape of the labels of `num_rows` rows."""
    # One label has no axis of its own, as in a TaskBatch.
    return (num_rows, features.num_labels) if features.num_labels > 1 else (num_rows,)
