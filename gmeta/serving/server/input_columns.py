"""The columns of a model as the inputs of a server; request_rows.py makes rows of them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from gmeta.errors import UserError
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig
from gmeta.serving.outputs import PREDICTION, Output, list_outputs
from gmeta.serving.server.tensors import EVENTS, LENGTHS, SUPPORT
from metaio.prepare.schema.conditions import parse_where
from metaio.prepare.schema.schema import DenseColumn, LabelColumn, Schema, make_event_schema
from metaio.quantities import format_count

MOST_EXAMPLES = 10  # values of a column
_NOT_KNOWN: Mapping[str, Sequence[Any]] = MappingProxyType({})
_NUMBERS: tuple[float, ...] = (0.5, 1.5, 2.5)
_INTEGER = re.compile(r"-?\d{1,19}", re.ASCII)


@dataclass(frozen=True)
class InputColumn:
    """One column: `role` is task, label, single, multi, dense, vector or event."""

    name: str
    role: str
    datatype: str  # as metadata names it; other numeric types are taken too
    is_list: bool  # several values a row
    values: str  # in words
    # What rows may hold, real values where they are known; of a label, disliked before liked.
    examples: tuple[int | float | str, ...]
    width: int = 1  # numbers of a vector, each like its row's example


@dataclass(frozen=True)
class ModelColumns:
    """All columns of a model; `read` are those that query rows need, in order."""

    task: InputColumn
    # And masks, weights, and what makes events: what support rows need beside `read`.
    labels: tuple[InputColumn, ...]
    read: tuple[InputColumn, ...]
    # Columns of the schema that no prediction needs: taken and left alone.
    ignored: frozenset[str]
    outputs: tuple[Output, ...]
    item: str  # the column that candidates differ in
    # Columns that are read as lists of ids and as nothing else.
    lists: frozenset[str]
    events: Mapping[str, InputColumn]  # of events, by name; {} where the model reads none

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
        columns = self.by_name | {EVENTS + name: one for name, one in self.events.items()}
        return {name: (column.datatype, column.is_list) for name, column in columns.items()}


def describe_columns(
    config: ExportedConfig, values_by_column: Mapping[str, Sequence[Any]] = _NOT_KNOWN
) -> ModelColumns:
    """Return the columns of an exported model, with examples of the known values. Raise UserError
    for one that cannot be an input."""
    exported, features, read = config.columns, config.features, dict[str, InputColumn]()
    ignored: set[str] = set()
    schema = exported.schema
    single_names = {one.name for one in features.single}
    if schema is None:
        rows = {table.name: table.num_rows for table in features.tables}
        for role, sparse in (("single", features.single), ("multi", features.multi)):
            for one in sparse:
                values = f"ids 0 to {rows[one.table] - 1}; 0: unknown"
                examples = _choose_examples("INT64", values_by_column.get(one.name, ()))
                read[one.name] = InputColumn(
                    one.name, role, "INT64", role == "multi", values, examples
                )
        for name in features.dense:
            read[name] = _dense_column(DenseColumn(name), exported)
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
                examples = _choose_examples(datatype, values_by_column.get(column.column, ()))
                read[column.column] = InputColumn(
                    column.column, role, datatype, is_list, values, examples
                )
        for dense in schema.dense:
            # A column may be dense and sparse at once: it is sent as what its ids are made of.
            read.setdefault(dense.column, _dense_column(dense, exported))
        for vector in schema.vector:
            numbers = format_count(vector.width, "number")
            read[vector.column] = InputColumn(
                vector.column, "vector", "FP32", True, numbers, _NUMBERS, vector.width
            )
        # Taken and left alone: callers may send entire rows of their logs.
        ignored = set(schema.columns) - read.keys()
    task = InputColumn(exported.task, "task", "INT64", False, "integer or text", (1,))
    model_columns = ModelColumns(
        read.get(exported.task, task),
        tuple(read.get(one.name, one) for one in _label_columns(config) + _event_columns(config)),
        tuple(read.values()),
        frozenset(ignored),
        list_outputs(config),
        _find_item(config, read),
        frozenset(
            name
            for name, column in read.items()
            if column.role == "multi" and name not in single_names
        ),
        _describe_events(config, read),
    )
    for name in model_columns.by_name:
        # Such a name could mean two things in a request.
        is_length = name.endswith(LENGTHS) and name[: -len(LENGTHS)] in {*read, "task"}
        is_event = bool(model_columns.events) and name.startswith(EVENTS)
        if name.startswith(SUPPORT) or is_length or is_event:
            raise UserError(
                f"column {name} cannot be an input of a server: {SUPPORT}NAME are the support "
                f"rows, {EVENTS}NAME events and NAME{LENGTHS} the lengths of lists. Rename the "
                "column before prepare"
            )
    return model_columns


def _choose_examples(datatype: str, known: Sequence[Any]) -> tuple[int | str, ...]:
    """Return the known values as the datatype has them; made up ones where there are none."""
    if datatype == "BYTES":
        return tuple(map(str, known)) or tuple(f"value {at + 1}" for at in range(MOST_EXAMPLES))
    # A table that integers share with texts holds texts.
    whole = [int(value) for value in known if _INTEGER.fullmatch(str(value))]
    return tuple(whole or range(1, MOST_EXAMPLES + 1))


def _dense_column(dense: DenseColumn, exported: ExportedColumns) -> InputColumn:
    """Return a column of numbers, its examples around its mean where training took that."""
    values, examples = "a number" + "; null allowed" * (dense.fill is not None), _NUMBERS
    if moments := exported.moments.get(dense.column):
        mean, deviation = moments
        near = mean - deviation, mean, mean + deviation
        examples = tuple(float(f"{math.expm1(each) if dense.log1p else each:.4g}") for each in near)
    return InputColumn(dense.column, "dense", "FP32", False, values, examples)


def _find_item(config: ExportedConfig, read: Mapping[str, InputColumn]) -> str:
    """Return the item's column, or of a model that does not say, the one of the largest table."""
    schema, rows = config.columns.schema, {one.name: one.num_rows for one in config.features.tables}
    rule = schema.item_rule if schema else None
    said = rule.column if rule else config.neighbours.column
    single = sorted(config.features.single, key=lambda one: -rows[one.table])
    names = [said, *(one.name for one in single), *read]
    # A request is of one task, so it cannot be the task's own column unless there is no other.
    return next((n for n in names if n in read and n != config.columns.task), next(iter(read)))


def _label_columns(config: ExportedConfig) -> list[InputColumn]:
    """Return the columns of labels, then those of masks and weights."""
    schema = config.columns.schema
    described = {}
    if schema is not None:  # a mask of 1 knows the label, a weight of 1 changes nothing
        described = dict.fromkeys(schema.label_columns, ("a number", (1.0, 1.0)))
    labels = schema.labels if schema else (LabelColumn(config.columns.label),)
    for at, (label, loss) in enumerate(zip(labels, config.losses, strict=True)):
        values, (least, most) = "0 to 1", (0.0, 1.0)
        if loss != "bce":
            values, known = "a number", config.label_range[2 * at : 2 * at + 2]
            least, most = known or (0.0, config.positive_rating or 1.0)
        if label.threshold is not None:
            values = f"a number; 1 from {label.threshold:g} on, else 0"
            least, most = label.threshold - 1, label.threshold
        masked = f"; anything, or null, where {label.mask} is 0" if label.mask else ""
        values += "; null allowed" if label.null == "unknown" else masked
        described[label.column] = values, (least, most)
    return [
        InputColumn(name, "label", "FP32", False, values, examples)
        for name, (values, examples) in described.items()
    ]


def _event_columns(config: ExportedConfig) -> list[InputColumn]:
    """Return the time, and the columns of events.where that are no label, of the log's rows."""
    schema = config.columns.schema
    if schema is None or schema.events is None or schema.time is None:
        return []
    conditions = [] if schema.event_files else parse_where(schema.events.where)
    named = [schema.time.column, *(condition.column for condition in conditions)]
    described = _columns_beside(schema)
    return [described[name] for name in dict.fromkeys(named) if name not in schema.label_columns]


def _describe_events(
    config: ExportedConfig, read: Mapping[str, InputColumn]
) -> dict[str, InputColumn]:
    """Return what events have, where the model encodes them."""
    schema = config.columns.schema
    if schema is None or schema.events is None or not config.model.events:
        return {}
    names = [name for name in make_event_schema(schema).columns if name != schema.task.column]
    described = {**_columns_beside(schema), **read}
    return {name: described[name] for name in names}


def _columns_beside(schema: Schema) -> dict[str, InputColumn]:
    """Return the time and the columns of events.where, by name."""
    assert schema.time is not None  # of a schema with [events]
    assert schema.events is not None
    values = "seconds, or the unit of a log of numbers, or text as the log has it; the event's time"
    time = schema.time.column
    found = {time: InputColumn(time, "event", "INT64", False, values, (0,))}
    for name, comparison, value in parse_where(schema.events.where):
        datatype = "BYTES" if isinstance(value, str) else "FP64"
        values = f"decides whether the row is an event: {comparison} {value}"
        found[name] = InputColumn(name, "event", datatype, False, values, (value,))
    return found
