"""Streams whose files lack columns, and logs in narrower types."""

from pathlib import Path

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
