"""From columns of rows, raw or already table ids, to encoded rows: where input is checked.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns, L labels"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gmeta.errors import UserError
from gmeta.losses.row_losses import ANY_NUMBER, defined_labels_N
from gmeta.serving.encoded_rows import EVENT_ALONE, IS_EVENT, EncodedColumns, no_events, take_rows
from gmeta.serving.exported_folder import ExportedColumns
from gmeta.serving.row_translation import RowTranslation
from metaio.errors import DataError
from metaio.format.features import Features, FeatureSpec
from metaio.prepare.episodes.encode import Encoder, FittedEncoding
from metaio.prepare.episodes.encoded_rows import fill_columns
from metaio.prepare.schema.event_columns import find_events, read_event_times
from metaio.prepare.schema.rules import SplitRule
from metaio.prepare.schema.schema import Schema, make_event_schema
from metaio.prepare.schema.values import (
    decode_views,
    hash_values,
    infer_kind,
    to_float32,
    to_float64,
    to_int64,
)
from metaio.quantities import format_count
from metaio.ragged import Float32, Int64, offsets, reorder_row_by_row

# What Arrow raises for what it cannot read; OverflowError: a Python integer beyond 64 bits.
_NOT_READ = (pa.ArrowException, TypeError, ValueError, OverflowError)


class ColumnEncoder(Protocol):
    """Turns a record batch of the columns `names(...)` into ids."""

    @property
    def lists(self) -> list[str]:
        """Return the column of each multi-id feature."""

    @cached_property
    def translation(self) -> RowTranslation:
        """Return what makes encoded rows readable for other versions of the model."""

    def names(self, with_label: bool) -> list[str]:
        """Return the columns that `encode` reads, without the task column."""

    def encode(self, batch: pa.RecordBatch, with_label: bool) -> EncodedColumns:
        """Return the rows; labels are 0 without `with_label`. Raise DataError: a wrong column."""

    def event_names(self) -> list[str]:
        """Return the columns that `encode_events` reads, without the task column; [] where the
        model was trained without events."""

    def encode_events(self, batch: pa.RecordBatch, blank: EncodedColumns) -> EncodedColumns:
        """Return the rows of `blank`, which are 0, as the events of a batch, and nothing else."""

    def example_values(self, count: int) -> dict[str, list[Any]]:
        """Return up to `count` values of each sparse column whose table says which it knows."""


class RawColumnEncoder:
    """Rows as they were given to `gmeta prepare`: hashes, vocabularies and moments apply."""

    def __init__(
        self, columns: ExportedColumns, schema: Schema, vocabularies: Mapping[str, pa.Array]
    ) -> None:
        self._task = columns.task
        # Rows to predict have no split or side, and their order within a task does not matter.
        unused: Any = dict.fromkeys(
            ("time", "row_id", "membership", "negatives", "stream", "events")
        )
        # Support rows are events, too: their time and what decides that are read with the label.
        self._with_events = schema if schema.events is not None else None
        self._schema = replace(schema, splits=SplitRule(), **unused)
        fitted = FittedEncoding(dict(vocabularies), dict(columns.moments), kinds=columns.kinds)
        self._encoder = Encoder(self._schema, fitted)
        # A column of nulls alone, or of no rows, says nothing of its type: the schema does.
        self._null_types = {
            **{name: pa.float64() for name in schema.label_columns},
            **{column.column: pa.float64() for column in schema.dense},
            **{column.column: pa.list_(pa.float32()) for column in schema.vector},
            **{c.column: pa.list_(pa.int64()) for c in schema.multi if c.separator is None},
        }

    @property
    def lists(self) -> list[str]:
        """Return the raw column of each multi-id feature."""
        return [column.column for column in self._schema.multi]

    @cached_property
    def translation(self) -> RowTranslation:
        """Return the translation by values and numbers as the schema's columns hold them."""
        schema, fitted = self._schema, self._encoder.fitted
        meaning = [
            [[c.column, c.hash, fitted.kinds.get(c.column)] for c in schema.sparse],
            [[c.column, c.log1p] for c in schema.dense],
            [[c.column, c.width] for c in schema.vector],
            [[c.column, c.threshold] for c in schema.labels],
            schema.weight and schema.weight.column,
        ]
        tables = [[column.table_name for column in side] for side in (schema.single, schema.multi)]
        plain = 0.0, 1.0
        moments = [
            fitted.moments[column.column] if column.standardise else plain
            for column in schema.dense
        ]
        moments += [plain] * sum(column.width for column in schema.vector)
        return RowTranslation(meaning, fitted.vocabularies, (tables[0], tables[1]), moments)

    def names(self, with_label: bool) -> list[str]:
        """Return the raw columns that the schema encodes."""
        schema = self._schema
        # A task or label column may be a feature as well: then query rows need it too.
        unused = {schema.task.column, *schema.label_columns} - set(schema.inputs)
        columns = [name for name in schema.columns if name not in unused]
        if not with_label:
            return columns
        of_events = []
        if self._with_events is not None and self._with_events.time is not None:
            of_events = [self._with_events.time.column, *self._with_events.event_conditions]
        return list(dict.fromkeys([*columns, *schema.label_columns, *of_events]))

    def encode(self, batch: pa.RecordBatch, with_label: bool) -> EncodedColumns:
        """Return the rows hashed, looked up and standardised as prepare did."""
        batch = self._with_task(_with_types(batch, self._null_types, pa.string()))
        rows = self._encoder.encode(batch, with_label)
        names = [array.name for array in fields(EncodedColumns) if array.name != "event_times"]
        return EncodedColumns(
            **{name: getattr(rows, name) for name in names},
            event_times=self._find_events(batch, rows.label_N if with_label else None),
        )

    def _with_task(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        # The encoder hashes tasks, which a caller with rows of one need not name.
        if self._task in batch.schema.names:
            return batch
        return batch.append_column(self._task, pa.array(np.zeros(batch.num_rows, np.int64)))

    def _find_events(
        self, batch: pa.RecordBatch, label_N: Float32 | None
    ) -> npt.NDArray[np.float64]:
        """Return seconds and whether the row is an event [N, 2]; [N, 0] of a model without."""
        schema, found = self._with_events, np.zeros((batch.num_rows, 2), np.float64)
        if schema is None or schema.time is None or schema.events is None:
            return found[:, :0]
        if label_N is not None:
            found[:, 0] = read_event_times(schema.time, batch[schema.time.column])
            is_event = find_events(schema.events, batch)
            found[:, 1] = is_event[:, 0] if is_event.shape[1] else IS_EVENT
            if schema.negatives is not None:
                found[label_N == 0, 1] = 0  # a drawn item is no event of its task
        return found

    @cached_property
    def _event_encoder(self) -> Encoder:
        own = make_event_schema(self._with_events or self._schema)
        plain = replace(own, time=None, events=None, splits=SplitRule(), stream=None)
        return self._encoder.with_schema(plain)

    def event_names(self) -> list[str]:
        """Return the columns of [events], its time, and what says whether a row is one."""
        if self._with_events is None:
            return []
        return [n for n in make_event_schema(self._with_events).columns if n != self._task]

    def encode_events(self, batch: pa.RecordBatch, blank: EncodedColumns) -> EncodedColumns:
        """Return the events of a batch with their columns as prepare encoded them."""
        schema = self._with_events
        assert schema is not None  # has event_names
        assert schema.time is not None
        batch = self._with_task(_with_types(batch, self._null_types, pa.string()))
        rows, own = self._event_encoder.encode(batch, with_label=False), self._event_encoder.schema
        fill_columns(schema, own, rows, blank.ids_NF, blank.dense_NK)
        blank.event_times[:, 0] = read_event_times(schema.time, batch[schema.time.column])
        blank.event_times[:, 1] = EVENT_ALONE
        found = replace(blank, task_N=rows.task_N)
        is_event = find_events(make_event_schema(schema).events, batch)
        if is_event.shape[1]:
            found = take_rows(found, np.flatnonzero(is_event[:, 0]))
        return found

    def example_values(self, count: int) -> dict[str, list[Any]]:
        """Return values spread over each vocabulary; what hashed columns may hold nobody knows."""
        known = self._encoder.fitted.vocabularies
        examples = {}
        for column in self._schema.sparse:
            if column.table_name in known:
                # Without the nulls of freed rows.
                values = known[column.table_name].drop_null()
                places = _spread(0, len(values) - 1, count) if len(values) else []
                examples[column.column] = [values[place].as_py() for place in places]
        return examples


class IdColumnEncoder:
    """Rows that hold ids of the tables already, as in datasets without a schema."""

    def __init__(self, columns: ExportedColumns, features: Features) -> None:
        self._columns = columns
        self._features = features
        self._num_rows = {table.name: table.num_rows for table in features.tables}

    @property
    def lists(self) -> list[str]:
        """Return the multi-id features' own names."""
        return [feature.name for feature in self._features.multi]

    @cached_property
    def translation(self) -> RowTranslation:
        """Return the translation that leaves everything as it is, for the same tables."""
        features = self._features
        meaning = [
            [[one.name, one.table, self._num_rows[one.table]] for one in features.sparse],
            list(features.dense),
            self._columns.label,
        ]
        return RowTranslation(meaning, {}, ((), ()), [(0.0, 1.0)] * len(features.dense))

    def names(self, with_label: bool) -> list[str]:
        """Return the columns by the features' own names."""
        sparse = [feature.name for feature in self._features.sparse]
        label = [self._columns.label] if with_label else []
        return list(dict.fromkeys([*sparse, *self._features.dense, *label]))

    def encode(self, batch: pa.RecordBatch, with_label: bool) -> EncodedColumns:
        """Return the rows with their ids as they are, each checked against its table's size."""
        features, num_rows = self._features, batch.num_rows
        for name in batch.schema.names:
            if batch[name].null_count:
                raise DataError(
                    f"column {name} has {format_count(batch[name].null_count, 'null')}; none are "
                    "allowed. Remove those rows, or use id 0, which stands for unknown values"
                )
        lists = {feature.name: pa.list_(pa.int64()) for feature in features.multi}
        batch = _with_types(batch, lists, pa.int64())
        # A caller with rows of one task need not name it: then all have task 0.
        task_N, label_N = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.float32)
        if self._columns.task in batch.schema.names:
            task = batch[self._columns.task]
            kind = infer_kind(self._columns.task, task.type, "task")
            task_N = hash_values(task, kind).view(np.int64)
        if with_label:
            label_N = _read_finite(self._columns.label, batch, "label")
        ids_NF = np.empty((num_rows, len(features.single)), np.int64)
        for index, feature in enumerate(features.single):
            ids_NF[:, index] = self._ids(feature, batch[feature.name])
        dense_NK = np.empty((num_rows, len(features.dense)), np.float32)
        for index, name in enumerate(features.dense):
            dense_NK[:, index] = _read_finite(name, batch, "dense")
        lengths_NM, values_V = self._multi(batch)
        weight_NW = np.zeros((num_rows, 0), np.float32)  # no dataset without a schema has weights
        # Nor events.
        columns = task_N, label_N, ids_NF, dense_NK, lengths_NM, values_V, weight_NW
        return EncodedColumns(*columns, no_events(features, num_rows))

    def event_names(self) -> list[str]:
        """Return []: datasets without a schema have no events."""
        return []

    def encode_events(self, batch: pa.RecordBatch, blank: EncodedColumns) -> EncodedColumns:
        """Return `blank`: there are none."""
        return blank

    def example_values(self, count: int) -> dict[str, list[Any]]:
        """Return ids spread over each table, without that of unknown values."""
        last = {table: num_rows - 1 for table, num_rows in self._num_rows.items()}
        return {
            feature.name: _spread(min(last[feature.table], 1), last[feature.table], count)
            for feature in self._features.sparse
        }

    def _ids(self, feature: FeatureSpec, column: pa.Array) -> Int64:
        if infer_kind(feature.name, column.type, "sparse") != "integer":
            raise DataError(
                f"sparse column {feature.name} has type {column.type}; ids of table "
                f"{feature.table} are needed, since the model's dataset was prepared without a "
                "schema. Encode the column as prepare did"
            )
        ids, limit = to_int64(column), self._num_rows[feature.table]
        wrong = ids[(ids < 0) | (ids >= limit)]
        if len(wrong):
            raise DataError(
                f"column {feature.name} holds id {wrong[0]}; table {feature.table} has ids 0 to "
                f"{limit - 1}. Use 0 for values that the table does not know"
            )
        return ids

    def _multi(self, batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int32], Int64]:
        multi = self._features.multi
        lengths_NM = np.zeros((batch.num_rows, len(multi)), np.int32)
        parts = []
        for index, feature in enumerate(multi):
            column = batch[feature.name]
            if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
                raise DataError(
                    f"multi column {feature.name} has type {column.type}; a list of ids is "
                    "needed. Make each value a list, such as [3, 17]"
                )
            lengths_NM[:, index] = np.diff(column.offsets.to_numpy())
            # Not column.values, which holds what lies outside a slice too.
            values = column.flatten()
            if values.null_count:
                raise DataError(
                    f"multi column {feature.name} has {format_count(values.null_count, 'null')} in "
                    "its lists; none are allowed. Use id 0, which stands for unknown values"
                )
            parts.append(self._ids(feature, values))
        return lengths_NM, reorder_row_by_row(lengths_NM, parts)


def _spread(first: int, last: int, count: int) -> list[int]:
    """Return up to `count` different integers from first to last, at equal distances."""
    return sorted({first + (last - first) * at // max(count - 1, 1) for at in range(count)})


def _with_types(
    batch: pa.RecordBatch, types: Mapping[str, pa.DataType], otherwise: pa.DataType
) -> pa.RecordBatch:
    """Return the batch with a type for each column of nulls alone, which Arrow gives none."""
    arrays = [
        column.cast(types.get(name, otherwise)) if pa.types.is_null(column.type) else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.record_batch(arrays, batch.schema.names)


def _read_finite(name: str, batch: pa.RecordBatch, role: str) -> Float32:
    return to_float32(name, to_float64(name, batch[name], role), role)


def as_table(rows: object, what: str) -> pa.Table:
    """Return columns as an Arrow table, from any form that ServedModel takes."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, Mapping):
        rows = {str(name): _as_column(str(name), values, what) for name, values in rows.items()}
    try:
        table = pa.table(rows)
        columns = [decode_views(column) for column in table.columns]
        return pa.table(columns, names=table.column_names)
    except _NOT_READ as error:
        raise UserError(
            f"{what} rows of type {type(rows).__name__} cannot be read as columns: "
            f"{_first_line(error)}. Give a mapping of column names to equally long lists "
            "or arrays, or an Arrow, pandas or polars table"
        ) from error


def _as_column(name: str, values: object, what: str) -> pa.Array | pa.ChunkedArray:
    try:
        if isinstance(values, torch.Tensor):
            # A tensor that requires a gradient refuses to become an array.
            values = values.detach().numpy()
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values
        try:
            return pa.array(values)
        except OverflowError:  # ids from 2^63 on, alone or in lists
            is_nested = isinstance(values, Sequence) and isinstance(values[0], Sequence)
            return pa.array(values, pa.list_(pa.uint64()) if is_nested else pa.uint64())
    except _NOT_READ as error:
        raise UserError(
            f"column {name} of the {what} rows, of type {type(values).__name__}, cannot be read: "
            f"{_first_line(error)}. Give a list or an array of one dimension, with a value for "
            "each row; of a column with several ids, a list of lists"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def check_task_kinds(name: str, support: pa.Table, query: pa.Table) -> None:
    """Raise UserError where the task column holds integers on one side, text on the other."""
    types = {"support": support.schema.field(name).type, "query": query.schema.field(name).type}
    # A side without rows may have no type, and matches nothing anyway.
    # 7 and "7" are different tasks, so no task would find its support rows.
    types = {side: kind for side, kind in types.items() if not pa.types.is_null(kind)}
    kinds = {side: infer_kind(name, kind, "task") for side, kind in types.items()}
    if len(set(kinds.values())) > 1:
        raise UserError(
            f"task column {name} holds {kinds['support']} in the support rows and "
            f"{kinds['query']} in the query rows: no task would find its support. Cast one of them"
        )


def select_columns(
    table: pa.Table, names: list[str], optional: list[str], what: str
) -> pa.RecordBatch:
    """Return the named columns as one record batch, with those optional ones that are there."""
    present = table.column_names
    place = {name: index for index, name in enumerate(present)}
    for name in names:
        if name not in place:
            near = difflib.get_close_matches(name, present, n=1)
            have = f"they have {', '.join(present) or 'none'}."
            raise UserError(
                f"{what} rows have no column {name}; "
                f"{f'did you mean {near[0]}?' if near else have} "
                f"This model reads {', '.join(names)}. Add the column"
            )
    chosen = list(dict.fromkeys([*names, *(name for name in optional if name in place)]))
    # Counted only where a name repeats: count() for each of many columns is quadratic.
    twice = [name for name in chosen if len(place) < len(present) and present.count(name) > 1]
    if twice:
        raise UserError(
            f"{what} rows have {present.count(twice[0])} columns {twice[0]}: one is needed. "
            "Rename or drop the others"
        )
    arrays = [table.column(place[name]).combine_chunks() for name in chosen]
    return pa.record_batch([_to_plain_lists(array) for array in arrays], chosen)


def _to_plain_lists(column: pa.Array) -> pa.Array:
    """Return the column as plain lists where it holds lists in another layout."""
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        column = _copy_list_views(column)
    kind = column.type
    # [[], []] says nothing of what its lists would hold.
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and pa.types.is_null(kind.value_type):
        return column.cast(pa.list_(pa.int64()))
    if pa.types.is_fixed_size_list(kind):
        return column.cast(pa.list_(kind.value_type))
    return column


def _copy_list_views(views: pa.Array) -> pa.Array:
    # Not by Arrow's own cast, which loses values.
    lengths_N = pc.fill_null(pc.list_value_length(views), 0).to_numpy()
    ends = pa.array(offsets(lengths_N.astype(np.int64)))
    return pa.LargeListArray.from_arrays(ends, views.flatten(), mask=views.is_null())


_ALLOWED = {"bce": "0 to 1, since it predicts clicks", "softmax": "numbers from 0 on"}


# Ranges of the labels of a block of training: a longer play is no error, another unit is.
_SLACK = 10.0


def check_labels(
    label_N: Float32,
    columns: str,
    kinds: Sequence[str],
    may_lack: bool,
    label_range: Sequence[float] = (),
) -> None:
    """Raise UserError for a label that its loss cannot take, or far outside of `label_range`, least
    and most of each label in training; `may_lack` allows NaN (not known)."""
    label_NL = label_N.reshape(len(label_N), len(kinds))
    names = columns.split(", ") if len(kinds) > 1 else [columns]
    for at, (label_N, name, loss) in enumerate(zip(label_NL.T, names, kinds, strict=True)):
        wrong_N = label_N[~defined_labels_N(loss, label_N) & ~(may_lack & np.isnan(label_N))]
        if wrong_N.size:
            allowed = _ALLOWED.get(loss, "finite numbers")
            raise UserError(
                f"label column {name} holds {wrong_N[0]:g}: this model takes {allowed}. Correct "
                "the label"
            )
        if not label_range or loss not in ANY_NUMBER:
            continue
        least, most = label_range[2 * at], label_range[2 * at + 1]
        slack = _SLACK * ((most - least) or 1.0)
        if (far_N := label_N[(label_N < least - slack) | (label_N > most + slack)]).size:
            raise UserError(
                f"label column {name} holds {far_N[0]:g}, and this model was trained on labels "
                f"from {least:g} to {most:g}. Bring it to their unit, or leave the row out"
            )
