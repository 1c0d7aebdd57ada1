"""The columns of a model as the inputs of a server; request_rows.py makes rows of them."""

from dataclasses import dataclass
from functools import cached_property

from gmeta.errors import UserError
from gmeta.serving.exported_folder import ExportedConfig
from gmeta.serving.outputs import PREDICTION, Output, list_outputs
from gmeta.serving.server.tensors import LENGTHS, SUPPORT
from metaio.quantities import format_count


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
    # Columns that are read as lists of ids and as nothing else.
    lists: frozenset[str]

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
    single_names = {one.name for one in features.single}
    if schema is None:
        rows = {table.name: table.num_rows for table in features.tables}
        for role, sparse in (("single", features.single), ("multi", features.multi)):
            for one in sparse:
                values = f"ids 0 to {rows[one.table] - 1}; 0: unknown"
                read[one.name] = InputColumn(one.name, role, "INT64", role == "multi", values)
        for name in features.dense:
            read[name] = InputColumn(name, "dense", "FP32", False, "a number")
    else:
        single_names = {column.column for column in schema.single}
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
        frozenset(
            name
            for name, column in read.items()
            if column.role == "multi" and name not in single_names
        ),
    )
    for name in model_columns.by_name:
        # Such a name could mean two things in a request.
        is_length = name.endswith(LENGTHS) and name[: -len(LENGTHS)] in {*read, "task"}
        if name.startswith(SUPPORT) or is_length:
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
        masked = f"; anything, or null, where {label.mask} is 0" if label.mask else ""
        nulls = "; null allowed" if label.null == "unknown" else masked
        values_by_column[label.column] = range_text + nulls
    described = values_by_column.items()
    return [InputColumn(name, "label", "FP32", False, text) for name, text in described]
