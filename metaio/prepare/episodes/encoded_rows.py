"""Rows of a log as ids and numbers: what the encoder makes for buckets, episodes and streams.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from metaio.hashing import UInt64
from metaio.prepare.schema.schema import Schema
from metaio.ragged import Int64, index_entries, offsets, sum_rows


@dataclass(frozen=True)
class EncodedRows:
    """Rows as ids and numbers, with the keys that decide split, bucket and order."""

    task_hash_N: UInt64
    task_N: Int64
    time_N: Int64
    row_hash_N: UInt64
    # The second axis of row ids, weights, sides and items is 1, or 0 in logs without them.
    row_id_NR: Int64
    split_N: npt.NDArray[np.int32]
    label_N: npt.NDArray[np.float32]  # [N, labels] of several; NaN: not known
    weight_NW: npt.NDArray[np.float32]
    ids_NF: npt.NDArray[np.integer[Any]]  # int32 where all tables are that small
    dense_NK: npt.NDArray[np.float32]
    lengths_NM: npt.NDArray[np.int32]
    side_NS: npt.NDArray[np.int8]  # SUPPORT, QUERY, UNDECIDED or EVENT_ONLY
    is_event: npt.NDArray[np.int8]  # 1: an event; [N, 0] where all rows are, or none
    item_NI: UInt64  # hash of the item
    # Ids of all multi-id features, row by row, and column by column within a row.
    values_V: npt.NDArray[np.integer[Any]]

    @property
    def num_rows(self) -> int:
        """Return N."""
        return len(self.label_N)


def list_array_types(schema: Schema) -> dict[str, tuple[np.dtype[Any], int | None]]:
    """Return dtype and row width of each array of EncodedRows; None for arrays of one axis."""
    # int32 halves the bytes on disk and in caches; larger vocabularies would not fit in memory.
    small = all(column.hash is None or column.hash <= 1 << 31 for column in schema.sparse)
    ids = np.dtype("<i4" if small else "<i8")
    return {
        "task_hash_N": (np.dtype("<u8"), None),
        "task_N": (np.dtype("<i8"), None),
        "time_N": (np.dtype("<i8"), None),
        "row_hash_N": (np.dtype("<u8"), None),
        "row_id_NR": (np.dtype("<i8"), 1 if schema.row_id else 0),
        "split_N": (np.dtype("<i4"), None),
        "label_N": (np.dtype("<f4"), None if len(schema.labels) == 1 else len(schema.labels)),
        "weight_NW": (np.dtype("<f4"), int(schema.weight is not None)),
        "ids_NF": (ids, len(schema.single)),
        "dense_NK": (np.dtype("<f4"), len(schema.dense_names)),
        "lengths_NM": (np.dtype("<i4"), len(schema.multi)),
        "side_NS": (np.dtype("i1"), int(schema.has_sides)),
        "is_event": (np.dtype("i1"), int(bool(schema.event_conditions or schema.event_files))),
        "item_NI": (np.dtype("<u8"), int(schema.negatives is not None)),
        "values_V": (ids, None),
    }


def allocate_rows(schema: Schema, num_rows: int, num_values: int) -> EncodedRows:
    """Return uninitialised rows, whose arrays have the right types and sizes."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, (dtype, width) in list_array_types(schema).items():
        length = num_values if name == "values_V" else num_rows
        arrays[name] = np.empty(length if width is None else (length, width), dtype)
    return EncodedRows(**arrays)


def select_rows(rows: EncodedRows, chosen: Int64) -> EncodedRows:
    """Return the chosen rows, in the order chosen."""
    values = index_entries(offsets(sum_rows(rows.lengths_NM)), chosen)
    arrays = {
        name: np.take(array, values if name == "values_V" else chosen, axis=0)
        for name, array in vars(rows).items()
    }
    return EncodedRows(**arrays)


def concatenate_rows(schema: Schema, parts: list[EncodedRows]) -> EncodedRows:
    """Return all rows of any number of parts, in order."""
    num_values = sum(len(part.values_V) for part in parts)
    found = allocate_rows(schema, sum(part.num_rows for part in parts), num_values)
    for name, array in vars(found).items():
        # Without parts np.concatenate would fail, hence the empty first one.
        np.concatenate([array[:0], *(getattr(part, name) for part in parts)], out=array)
    return found


def find_value_starts(rows: EncodedRows) -> Int64:
    """Return where the list of each row and multi-id feature begins in `values_V` [N, M]."""
    lengths_NM = rows.lengths_NM
    first_N = offsets(sum_rows(lengths_NM))[:-1]
    before_NM = np.cumsum(lengths_NM, axis=1, dtype=np.int64) - lengths_NM
    return first_N[:, None] + before_NM


def fill_columns(
    schema: Schema, own: Schema, events: EncodedRows, ids_NF: Any, dense_NK: Any
) -> None:
    """Set the columns of a schema's rows that events have too, by `own`, the events' schema."""
    singles = [column.column for column in schema.single]
    for index, single in enumerate(own.single):
        ids_NF[:, singles.index(single.column)] = events.ids_NF[:, index]
    for index, dense in enumerate(own.dense):
        dense_NK[:, schema.dense_names.index(dense.column)] = events.dense_NK[:, index]
