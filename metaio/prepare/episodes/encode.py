"""Encodes raw rows by a schema: ids, dense values, and the keys of split, bucket and order.

DuckDB, Spark and prediction share it, so that they agree to the byte.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns, L labels"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.hashing import UInt64, splitmix64
from metaio.prepare.episodes.encoded_rows import EncodedRows, list_array_types
from metaio.prepare.episodes.splits import PLACE, Splits, assign_splits
from metaio.prepare.episodes.vocabulary import RowIndex, make_index
from metaio.prepare.schema.event_columns import find_events
from metaio.prepare.schema.label_columns import read_labels, read_weights
from metaio.prepare.schema.raw_columns import read_dense, read_lists, read_vectors
from metaio.prepare.schema.schema import DenseColumn, IdColumn, Schema
from metaio.prepare.schema.side_columns import SIDE_OF_FILE, read_sides
from metaio.prepare.schema.values import (
    Kind,
    hash_lists,
    hash_values,
    infer_kind,
    to_float32,
    to_int64,
    to_time_ticks,
)
from metaio.quantities import format_count
from metaio.ragged import Int64, reorder_row_by_row, sum_rows

_ONE = np.uint64(1)


@dataclass(frozen=True)
class FittedEncoding:
    """What prepare learnt from the train split, and new rows are encoded by."""

    # table -> values of rows 1, 2, ...; null: none
    vocabularies: dict[str, pa.Array] = field(default_factory=dict)
    # Mean and deviation of each column.
    moments: dict[str, tuple[float, float]] = field(default_factory=dict)
    splits: Splits = field(default_factory=Splits)
    # sparse column -> the kind of its values; absent: not known, either will do
    kinds: dict[str, Kind] = field(default_factory=dict)


def hash_tasks(schema: Schema, batch: pa.RecordBatch) -> tuple[UInt64, Int64]:
    """Return hash and id of each row's task; the id of text is its xxh3_64."""
    column = batch[schema.task.column]
    values = hash_values(column, infer_kind(schema.task.column, column.type, "task"))
    # Mixed, since buckets are ranges of the hash: small integers would all share the first one.
    return splitmix64(values), values.view(np.int64)


def check_nulls(schema: Schema, nulls: dict[str, int]) -> None:
    """Raise DataError for the first column that holds nulls and may not."""
    allowed = {column.column for column in schema.sparse if column.null == "unknown"}
    numbers = {column.column: column.fill for column in schema.dense}
    numbers |= {column.column: column.fill for column in schema.vector}
    allowed |= {name for name, fill in numbers.items() if fill is not None}
    allowed |= {label.column for label in schema.labels if not label.is_always_known}
    required = {schema.task.column, *schema.label_columns} - allowed
    required |= {part.column for part in (schema.time, schema.row_id) if part is not None}
    required |= {schema.negatives.item} if schema.negatives else set()
    if schema.membership is not None and schema.membership.column is not None:
        allowed.add(schema.membership.column)
    allowed.update(schema.event_conditions)
    for name in schema.columns:
        count = nulls.get(name, 0)
        if count and (name in required or name not in allowed):
            remedy = "Remove those rows"
            if name not in required:
                key = "fill = VALUE" if name in numbers else 'null = "unknown"'
                remedy += f", or allow it in the schema: {key}"
            raise DataError(
                f"column {name} has {format_count(count, 'null')}; none are allowed. {remedy}"
            )


def check_file_nulls(schema: Schema, nulls: dict[str, int]) -> None:
    """Raise DataError as `check_nulls`; of a stream not for labels, whose rows it sets aside."""
    aside = {label.column for label in schema.labels} if schema.stream else set()
    check_nulls(schema, {name: count for name, count in nulls.items() if name not in aside})


class Encoder:
    """Encodes raw record batches: equal rows give equal records, in whatever batch they are."""

    def __init__(
        self, schema: Schema, fitted: FittedEncoding, indexes: Mapping[str, RowIndex] | None = None
    ) -> None:
        self.schema = schema
        self.fitted = fitted
        self._types = list_array_types(schema)
        # Indexes of vocabularies are built when they are first needed; a stream passes its own.
        kinds: tuple[Kind, Kind] = ("integer", "text")
        self._indexes: dict[tuple[str, Kind], RowIndex] = {
            (table, kind): index for table, index in (indexes or {}).items() for kind in kinds
        }

    def with_schema(self, schema: Schema) -> Self:
        """Return an encoder of another log, by what was learnt from this one's."""
        found = type(self)(schema, self.fitted)
        found._indexes = self._indexes  # shared: they may be large
        return found

    def encode(self, batch: pa.RecordBatch, with_label: bool = True) -> EncodedRows:
        """Return the encoded rows of a batch; raise DataError for values that break the schema.
        Rows without a label, which are to be predicted, have no identity."""
        schema, types = self.schema, self._types
        check_nulls(schema, {name: batch[name].null_count for name in batch.schema.names})
        num_rows = batch.num_rows
        task_hash_N, task_N = hash_tasks(schema, batch)
        time_N = np.zeros(num_rows, dtype=np.int64)
        if schema.time is not None:
            time_N = to_time_ticks(schema.time.column, batch[schema.time.column])
        split_N = np.zeros(num_rows, np.int32)
        label_N = np.zeros((num_rows, *[len(schema.labels)][: len(schema.labels) > 1]), np.float32)
        weight_NW = np.ones((num_rows, int(schema.weight is not None)), np.float32)
        if with_label:
            split_N = assign_splits(schema, self.fitted.splits, batch, task_hash_N).astype(np.int32)
            label_N, weight_NW = read_labels(schema, batch), read_weights(schema, batch)
        # Row-major arrays: rows are what buckets, sorts and episodes move.
        ids_NF = np.empty((num_rows, len(schema.single)), dtype=types["ids_NF"][0])
        for index, single in enumerate(schema.single):
            ids_NF[:, index] = self._encode_ids(single, batch[single.column])
        dense_NK = np.empty((num_rows, types["dense_NK"][1] or 0), dtype=np.float32)
        for index, dense in enumerate(schema.dense):
            dense_N = self.encode_dense(dense, batch[dense.column])
            dense_NK[:, index] = to_float32(dense.column, dense_N, "dense")
        first = len(schema.dense)
        for vector in schema.vector:
            column = batch[vector.column]
            dense_NK[:, first : first + vector.width] = read_vectors(vector, column)
            first += vector.width
        lengths_NM = np.zeros((num_rows, len(schema.multi)), dtype=np.int32)
        values_V = self._encode_lists(batch, lengths_NM)
        row_id_NR, identity_N = self._encode_row_ids(batch), np.zeros(num_rows, np.uint64)
        if with_label:
            label_NL = label_N.reshape(num_rows, len(schema.labels)).view(np.uint32)
            bits_N = label_NL[:, 0] ^ hash_lists(values_V, sum_rows(lengths_NM))
            inputs = ids_NF, dense_NK.view(np.uint32), lengths_NM
            columns = *inputs, label_NL[:, 1:], weight_NW.view(np.uint32)
            identity_N = self._hash_identity(batch, row_id_NR, bits_N, *columns)
        return EncodedRows(
            task_hash_N,
            task_N,
            time_N,
            identity_N,
            row_id_NR,
            split_N,
            label_N,
            weight_NW,
            ids_NF,
            dense_NK,
            lengths_NM,
            self._encode_sides(batch),
            find_events(schema.events, batch),
            self._hash_items(batch),
            values_V.astype(types["values_V"][0]),
        )

    def _hash_identity(
        self,
        batch: pa.RecordBatch,
        row_id_NR: Int64,
        bits_N: UInt64,
        *columns: npt.NDArray[np.integer[Any]],
    ) -> UInt64:
        """Return what tells a row from others of its task, mixed with the seed."""
        schema, seed = self.schema, np.uint64(self.schema.seed)
        if schema.row_id is not None:
            return splitmix64(splitmix64(row_id_NR[:, 0].view(np.uint64)) ^ seed)
        if schema.needs_input_order:
            # Its place among the task's rows, known where these meet. Not a hash of its values:
            # with one feature less, other rows would become query rows.
            if PLACE in batch.schema.names:
                return to_int64(batch[PLACE]).view(np.uint64)
            return np.zeros(batch.num_rows, np.uint64)
        # Without the task: the hash orders rows within a task only.
        return hash_rows(bits_N ^ seed, *columns)

    def _encode_row_ids(self, batch: pa.RecordBatch) -> Int64:
        """Return the ids of rows, [N, 1] or [N, 0]: integers as they are, text as its xxh3_64."""
        rule = self.schema.row_id
        if rule is None:
            return np.zeros((batch.num_rows, 0), np.int64)
        column = batch[rule.column]
        kind = infer_kind(rule.column, column.type, "row_id")
        return hash_values(column, kind).view(np.int64)[:, None]

    def _encode_sides(self, batch: pa.RecordBatch) -> npt.NDArray[np.int8]:
        rule, num_rows = self.schema.membership, batch.num_rows
        name = SIDE_OF_FILE if rule is None or rule.column is None else rule.column
        # Windows of time give sides later, a different one in each window.
        if rule is None or name not in batch.schema.names:
            return np.zeros((num_rows, int(self.schema.has_sides)), np.int8)
        return read_sides(name, batch[name])[:, None]

    def _hash_items(self, batch: pa.RecordBatch) -> UInt64:
        rule = self.schema.negatives
        if rule is None:
            return np.zeros((batch.num_rows, 0), np.uint64)
        column = batch[rule.item]
        kind = infer_kind(rule.item, column.type, "negatives")
        return splitmix64(hash_values(column, kind))[:, None]

    def _encode_ids(self, rule: IdColumn, column: pa.Array) -> Int64:
        kind = infer_kind(rule.column, column.type, "sparse")
        self._check_kind(rule.column, column, kind)
        # Nulls get row 0; check_nulls let through only those that the schema allows.
        if column.null_count:
            known = column.is_valid().to_numpy(zero_copy_only=False)
            ids = np.zeros(len(column), dtype=np.int64)
            ids[known] = self._encode_ids(rule, column.drop_null())
            return ids
        if pa.types.is_dictionary(column.type) and len(column.dictionary) <= len(column):
            # Each value is looked up once, however many rows have it.
            return self._encode_ids(rule, column.dictionary)[to_int64(column.indices)]
        # Row 0 is for unknown values, so values share num_rows - 1 rows. The bias of the remainder
        # is below num_rows / 2^64.
        if rule.hash is not None:
            return hash_to_rows(column, kind, rule.hash)
        return self._look_up(rule.table_name, column, kind)

    def _check_kind(self, name: str, column: pa.Array, kind: Kind) -> None:
        expected = self.fitted.kinds.get(name, kind)
        # A column without a value may have any type.
        if kind != expected and column.null_count < len(column):
            raise DataError(
                f"sparse column {name} holds {kind} values; they were {expected} when the data was "
                f"prepared, and would get other ids. Cast the column to {expected}"
            )

    def _look_up(self, table: str, column: pa.Array, kind: Kind) -> Int64:
        key = (table, kind)
        if key not in self._indexes:
            # Two threads may both build an index; setdefault keeps the first.
            self._indexes.setdefault(key, make_index(self.fitted.vocabularies[table], kind))
        if kind == "integer":
            column = pa.array(to_int64(column))  # written as they were counted
        return self._indexes[key].rows(column)

    def encode_dense(self, rule: DenseColumn, column: pa.Array) -> npt.NDArray[np.float64]:
        """Return the numbers of a dense column as inputs [N]."""
        numbers = read_dense(rule, column.drop_null())
        if column.null_count:
            # As float64: a fill of 0.5 would become 0 in a column of integers.
            known = column.is_valid().to_numpy(zero_copy_only=False)
            filled = read_dense(rule, pa.array([rule.fill], pa.float64())).repeat(len(column))
            filled[known] = numbers
            numbers = filled
        if rule.standardise:
            mean, deviation = self.fitted.moments[rule.column]
            numbers = (numbers - mean) / deviation
        return numbers

    def _encode_lists(self, batch: pa.RecordBatch, lengths_NM: npt.NDArray[np.int32]) -> Int64:
        """Return the ids [V] row by row; fill in `lengths_NM`."""
        ids = []
        for index, rule in enumerate(self.schema.multi):
            lists = read_lists(rule, batch[rule.column])
            lengths_NM[:, index] = to_int64(pc.fill_null(pc.list_value_length(lists), 0))
            ids.append(self._encode_ids(rule, lists.flatten()))
        return reorder_row_by_row(lengths_NM, ids)


def hash_to_rows(column: pa.Array, kind: Kind, num_rows: int) -> Int64:
    """Return the row of each value, no nulls, in a hashed table: 1 to num_rows - 1."""
    mixed = splitmix64(hash_values(column, kind))
    # numpy turns division by a constant into multiplications, but not its remainder.
    whole = mixed // np.uint64(num_rows - 1)
    whole *= np.uint64(num_rows - 1)
    mixed -= whole
    mixed += _ONE
    return mixed.view(np.int64)


def hash_rows(bits_N: UInt64, *columns: npt.NDArray[np.integer[Any]]) -> UInt64:
    """Return the hash that orders rows of equal time; equal hashes mean equal stored rows."""
    # Multilinear hashing modulo 2^64 with fixed odd multipliers, then a final mix (Lemire, Kaser
    # 2014): mixing each entry would take five times as long.
    total_N = splitmix64(bits_N)
    multipliers = splitmix64(np.arange(sum(c.shape[1] for c in columns), dtype=np.uint64)) | _ONE
    for column in columns:
        for index in range(column.shape[1]):
            total_N += column[:, index].astype(np.uint64) * multipliers[index]
        multipliers = multipliers[column.shape[1] :]
    return splitmix64(total_N)
