"""Applies a user's function to raw rows, before anything else is done with them.

Its output, a temporary Parquet file for each input, is what the schema describes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta_keys.plugins import Registry
from gmeta_keys.translate_errors import format_foreign_error, translate_errors
from metaio.errors import DataError, SchemaError, to_one_line
from metaio.prepare.schema.rules import TransformRule
from metaio.prepare.source.input_files import InputFiles, make_no_rows_error

Transform = Callable[[pa.RecordBatch], pa.RecordBatch]

NAMED_TRANSFORMS: Registry[Transform] = Registry(
    "transform.function",
    "gmeta.transforms",
    {},
    "a function of a pyarrow RecordBatch",
    lambda found: callable(found) and not isinstance(found, type),
)


def find_transform(rule: TransformRule) -> Transform:
    """Return the rule's function."""
    try:
        return NAMED_TRANSFORMS.find(rule.function)
    except ValueError as error:
        raise SchemaError(f"schema key {error}") from error


def check_trusted(rule: TransformRule | None) -> None:
    """Check the name of a function that came with a stream."""
    try:
        if rule is not None:
            NAMED_TRANSFORMS.check_trusted(rule.function)
    except ValueError as error:
        raise SchemaError(f"the stream was begun with {error}: docs/extending.md") from error


def describe_transform(rule: TransformRule | None) -> dict[str, Any]:
    """Return what a dataset's report says of the transform of its rows; {} without one."""
    if rule is None:
        return {}
    return {"transform": {"function": rule.function} | NAMED_TRANSFORMS.package_of(rule.function)}


def transform_inputs(
    inputs: InputFiles,
    rule: TransformRule,
    wanted: list[str],
    batches_of: Callable[[str, tuple[str, ...]], Iterator[pa.RecordBatch]],
    folder: Path,
) -> InputFiles:
    """Return the inputs as the function transforms them, one file each below `folder`."""
    # `batches_of` yields the rows of a file, of some columns or, for (), of all.
    function, names, before = find_transform(rule), [], None
    folder.mkdir()
    for index, name in enumerate(inputs.names):
        # Numbered, since inputs of two folders may have one name.
        path = folder / f"{index}-{Path(name).name}.parquet"
        writer: pq.ParquetWriter | None = None
        try:
            for batch in batches_of(name, rule.columns):
                rows = _call_transform(function, rule.function, batch, name)
                # The first rows decide columns and types for all inputs.
                before = before or _check_schema(rows.schema, wanted, rule.function)
                # Metadata, such as pandas writes, may differ between batches.
                if rows.schema.remove_metadata() != before:
                    raise DataError(
                        f"transform.function = {rule.function!r} returned the columns "
                        f"{_describe_columns(rows.schema)} of {name}, and "
                        f"{_describe_columns(before)} before: it "
                        "must return the same each time. Cast them"
                    )
                writer = writer or pq.ParquetWriter(path, before)
                writer.write_batch(rows.replace_schema_metadata())
        finally:
            if writer is not None:
                writer.close()
        # An input of which all rows were dropped has no file.
        names += [str(path)] if writer is not None else []
    if not names:
        raise make_no_rows_error(inputs.names, inputs.given)
    return replace(inputs, names=names, kind="Parquet")


def _call_transform(
    function: Transform, function_name: str, batch: pa.RecordBatch, name: str
) -> pa.RecordBatch:
    with translate_errors(
        lambda error: DataError(
            f"transform.function = {function_name!r} failed on {batch.num_rows:,} rows of {name}: "
            f"{format_foreign_error(error)}. Mend it, or leave [transform] out"
        )
    ):
        rows = function(batch)
    if not isinstance(rows, pa.RecordBatch):
        raise DataError(
            f"transform.function = {function_name!r} returned a {type(rows).__name__}: a pyarrow "
            "RecordBatch is needed. Mend it"
        )
    return rows


def _check_schema(schema: pa.Schema, wanted: list[str], function_name: str) -> pa.Schema:
    missing = [name for name in wanted if schema.names.count(name) != 1]
    if missing:
        raise DataError(
            f"transform.function = {function_name!r} returns the columns "
            f"{_describe_columns(schema)}: {missing[0]} "
            "of the schema must be one of them, once. Mend it, or correct the schema"
        )
    return schema.remove_metadata()


def _describe_columns(schema: pa.Schema) -> str:
    return to_one_line(", ".join(f"{field.name} ({field.type})" for field in schema), 300)
