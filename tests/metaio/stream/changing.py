"""Streams whose files lack columns, and logs in narrower types."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from metaio import Dataset
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.stream.logs import changed, schema

NARROW = {
    **dict.fromkeys(("user", "time", "row"), pa.int32()),
    **{"item": pa.int16(), "age": pa.uint8(), "click": pa.int8(), "price": pa.float32()},
}


def cast(table: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
    for name, kind in types.items():
        table = changed(table, name, table[name].cast(kind).combine_chunks())
    return table


def filling(**stream: object) -> Schema:
    """A schema whose inputs may all be null, for a stream that fills what a file lacks."""
    body = schema(missing="fill", **stream).to_json()
    for column in (*body["single"], *body["multi"]):
        column["null"] = "unknown"
    return parse_schema(body)


def written(dataset: Dataset) -> dict[str, bytes]:
    """The bytes of the shards and vocabularies of an increment."""
    root = Path(dataset.url)
    chosen = (path for path in sorted(root.rglob("*.parquet")))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in chosen}


# An integer, a text and a list join with their tables, a number as it is and one standardised.
JOINING = {
    "single": [
        {"column": "shop", "vocabulary": 1, "null": "unknown"},
        {"column": "place", "table": "city", "vocabulary": 1, "null": "unknown"},
        {"column": "device", "hash": 8, "null": "unknown"},
    ],
    "multi": [{"column": "genres", "vocabulary": 1, "null": "unknown", "separator": "|"}],
    "dense": [{"column": "rating", "fill": 2.5, "log1p": True}],
    "vector": [{"column": "image", "width": 2, "fill": 0.5}],
}


def with_inputs(own: Schema, first: bool) -> Schema:
    """The schema with more inputs, before or behind those of each kind."""
    body = own.to_json()
    for kind, more in JOINING.items():
        before = body.get(kind, [])
        body[kind] = [*more, *before] if first else [*before, *more]
    return parse_schema(body)


def with_columns(table: pa.Table, known: bool) -> pa.Table:
    """The table with the columns of the inputs that join: values, or nulls."""
    rng = np.random.default_rng(len(table))
    values: dict[str, pa.Array] = {
        "shop": pa.array(rng.integers(0, 30, len(table))),
        "place": pa.array([f"city {n}" for n in rng.integers(0, 9, len(table))]),
        "device": pa.array(rng.integers(0, 5, len(table))),
        "genres": pa.array([f"a|{n}" for n in rng.integers(0, 4, len(table))]),
        "rating": pa.array(rng.random(len(table))),
        "image": pa.array(rng.random((len(table), 2)).tolist(), pa.list_(pa.float64())),
    }
    for name, column in values.items():
        table = table.append_column(name, column if known else pa.nulls(len(table), column.type))
    return table
