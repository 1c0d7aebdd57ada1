"""The columns of a model as the inputs of a server, and rows made of tensors: inputs named like the
model's columns are query rows; with `support.` in front, support rows."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from gmeta.errors import UserError
from gmeta.serving.exported_folder import ExportedConfig
from gmeta.serving.outputs import PREDICTION, Output, list_outputs
from gmeta.serving.server.request_errors import bad_request
from gmeta.serving.server.tensors import Tensor
from metaio.quantities import format_count

SUPPORT = "support."
LENGTHS = ".lengths"


@dataclass(frozen=True)
class InputColumn:
    """One column: `role` is task, label, single, multi, dense or vector."""

    name: str
    role: str
    datatype: str  # as metadata names it; other numeric types are taken too
    is_list: bool  # several values a row
    values: str  # in words


@dataclass(frozen=True)
class ModelColumns:
    """All columns of a model; `read` are those that query rows need, in order."""

    task: InputColumn
    labels: tuple[InputColumn, ...]  # and masks and weights: what support rows need beside `read`
    read: tuple[InputColumn, ...]
    # Columns of the schema that no prediction needs: taken and left alone.
    ignored: frozenset[str]
    outputs: tuple[Output, ...]

    @cached_property
    def default_outputs(self) -> tuple[Output, ...]:
        """Return what a request without outputs is answered: labels after adaptation."""
        return tuple(output for output in self.outputs if output.kind == PREDICTION)

    @cached_property
    def by_name(self) -> dict[str, InputColumn]:
        """Return every column by its name."""
        return {column.name: column for column in (self.task, *self.labels, *self.read)}

    @property
    def signature(self) -> dict[str, tuple[str, bool]]:
        """Return what a caller must send: models with the same one take the same requests."""
        return {column.name: (column.datatype, column.is_list) for column in self.by_name.values()}


def describe_columns(config: ExportedConfig) -> ModelColumns:
    """Return the columns of an exported model. Raise UserError for one that cannot be an input."""
    exported, features, read = config.columns, config.features, dict[str, InputColumn]()
    ignored: set[str] = set()
    schema = exported.schema
    if schema is None:
        rows = {table.name: table.num_rows for table in features.tables}
        for role, sparse in (("single", features.single), ("multi", features.multi)):
            for one in sparse:
                values = f"ids 0 to {rows[one.table] - 1}; 0: unknown"
                read[one.name] = InputColumn(one.name, role, "INT64", role == "multi", values)
        for name in features.dense:
            read[name] = InputColumn(name, "dense", "FP32", False, "a number")
    else:
        for role, described in (("single", schema.single), ("multi", schema.multi)):
            for column in described:
                kind = exported.kinds.get(column.column, "text")
                is_list = role == "multi" and column.separator is None
                split = f", split at {column.separator!r}" if column.separator else ""
                nulls = "; null allowed" if column.null == "unknown" else ""
                datatype = "INT64" if kind == "integer" else "BYTES"
                values = f"{kind}{split}{nulls}"
                read[column.column] = InputColumn(column.column, role, datatype, is_list, values)
        for dense in schema.dense:
            # A column may be dense and sparse at once: it is sent as what its ids are made of.
            as_dense = InputColumn(dense.column, "dense", "FP32", False, "a number")
            read.setdefault(dense.column, as_dense)
        for vector in schema.vector:
            numbers = format_count(vector.width, "number")
            read[vector.column] = InputColumn(vector.column, "vector", "FP32", True, numbers)
        # Taken and left alone: callers may send entire rows of their logs.
        ignored = set(schema.columns) - read.keys()
    task = InputColumn(exported.task, "task", "INT64", False, "integer or text")
    model_columns = ModelColumns(
        read.get(exported.task, task),
        tuple(read.get(label.name, label) for label in _label_columns(config)),
        tuple(read.values()),
        frozenset(ignored),
        list_outputs(config),
    )
    for name in model_columns.by_name:
        # Such a name could mean two things in a request.
        if name.startswith(SUPPORT) or (name.endswith(LENGTHS) and name[: -len(LENGTHS)] in read):
            raise UserError(
                f"column {name} cannot be an input of a server: {SUPPORT}NAME are the support rows "
                f"and NAME{LENGTHS} the lengths of lists. Rename the column before prepare"
            )
    return model_columns


def _label_columns(config: ExportedConfig) -> list[InputColumn]:
    """Return the columns of labels, then those of masks and weights."""
    values = ["0 to 1" if loss == "bce" else "a number" for loss in config.losses]
    schema = config.columns.schema
    if schema is None:
        return [InputColumn(config.columns.label, "label", "FP32", False, values[0])]
    values_by_column = dict.fromkeys(schema.label_columns, "a number")
    for label, range_text in zip(schema.labels, values, strict=True):
        nulls = "; null allowed" if label.null == "unknown" else ""
        values_by_column[label.column] = range_text + nulls
    described = values_by_column.items()
    return [InputColumn(name, "label", "FP32", False, text) for name, text in described]


def to_tables(
    columns: ModelColumns, tensors: Sequence[Tensor]
) -> tuple[pa.Table | None, pa.Table | None]:
    """Return the support and the query rows of a request, or None. Raise RequestError."""
    sides: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for tensor in tensors:
        is_support = tensor.name.startswith(SUPPORT)
        side = sides[0 if is_support else 1]
        name = tensor.name.removeprefix(SUPPORT) if is_support else tensor.name
        if name in side:
            raise bad_request(f"input {tensor.name} is there twice; once is allowed. Leave one out")
        side[name] = tensor
    support, query = (_to_table(columns, side) for side in sides)
    return support, query


def _to_table(columns: ModelColumns, side: Mapping[str, Tensor]) -> pa.Table | None:
    if not side:
        return None
    known, arrays = columns.by_name, dict[str, pa.Array]()
    for name, tensor in side.items():
        if name in known:
            lengths = side.get(name + LENGTHS) if known[name].is_list else None
            arrays[name] = _to_array(known[name], tensor, lengths)
        elif not _is_lengths(name, known, side) and name not in columns.ignored:
            near = difflib.get_close_matches(name, known, n=1)
            raise bad_request(
                f"input {tensor.name[:80]!r} is no column of this model; "
                f"{f'did you mean {near[0]}?' if near else 'it has ' + ', '.join(known) + '.'} "
                "Correct the name, or leave the input out"
            )
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        # The message stays one line, however many columns there are.
        sizes_text = ", ".join(f"{name} {size}" for name, size in list(sizes.items())[:6])
        raise bad_request(
            f"inputs of one side differ in rows ({sizes_text}); all need the same. Correct them"
        )
    return pa.table(arrays) if arrays else None


def _is_lengths(name: str, known: Mapping[str, InputColumn], side: Mapping[str, Tensor]) -> bool:
    column = name.removesuffix(LENGTHS)
    return column != name and column in side and column in known and known[column].is_list


def _to_array(column: InputColumn, tensor: Tensor, lengths: Tensor | None) -> pa.Array:
    if not column.is_list:
        if len(tensor.shape) == 2 and tensor.shape[1] != 1:
            raise bad_request(
                f"input {tensor.name} has shape {list(tensor.shape)}; [N] and [N, 1] are allowed, "
                "since each row has one value. Correct it"
            )
        return tensor.values
    if lengths is None:
        if len(tensor.shape) == 1:
            raise bad_request(
                f"input {tensor.name} has shape {list(tensor.shape)}, but each row has a list: "
                f"send [N, M] for lists of one length, or all values in [V] and the {tensor.name}"
                f"{LENGTHS} of the lists in [N]"
            )
        # [N, M]: every list has M values.
        offsets = np.arange(tensor.shape[0] + 1, dtype=np.int64) * tensor.shape[1]
        return pa.LargeListArray.from_arrays(offsets, tensor.values)
    sizes = lengths.values
    if len(tensor.shape) != 1 or len(lengths.shape) != 1 or not pa.types.is_integer(sizes.type):
        raise bad_request(
            f"input {tensor.name} with {lengths.name} needs both in one dimension and the lengths "
            f"as integers; they have {list(tensor.shape)}, {list(lengths.shape)} and {sizes.type}. "
            "Correct them"
        )
    if sizes.null_count:
        raise bad_request(f"input {lengths.name} holds null; the length of each list is needed")
    # As floats: the sum of integers that a stranger chose could wrap around.
    counts = sizes.to_numpy().astype(np.float64)
    if (counts < 0).any() or counts.sum() != len(tensor.values):
        raise bad_request(
            f"input {lengths.name} adds up to {counts.sum():.0f}; {tensor.name} has "
            f"{len(tensor.values)} values, and no length may be below 0. Correct them"
        )
    ends = np.concatenate([[0], np.cumsum(sizes.to_numpy().astype(np.int64))])
    return pa.LargeListArray.from_arrays(ends, tensor.values)
