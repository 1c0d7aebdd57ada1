"""Refuses columns that only DuckDB's names tell apart: it renames the second of two equal ones."""

import re
from collections.abc import Iterable

import duckdb
import fsspec
import pyarrow.parquet as pq

from metaio.errors import DataError
from metaio.prepare.schema.values import check_cases
from metaio.prepare.source.input_files import InputFiles
from metaio.prepare.source.sql import format_paths, format_scan


def check_names(
    connection: duckdb.DuckDBPyConnection,
    files: InputFiles,
    name: str,
    csv: str,
    found: Iterable[str],
    wanted: Iterable[str],
) -> None:
    """Raise DataError for a wanted column of a file that is there twice, perhaps in other letters,
    or that has its name from DuckDB alone; `found` are the names that DuckDB gives."""
    folded = {column.casefold() for column in found}
    # DuckDB does not tell letters of either case apart, either.
    if not any(re.sub(r"_\d+$", "", one) in folded - {one} for one in folded):
        return
    names = _read_names(connection, files, name, csv)
    check_cases(f"input {name}", names, wanted)
    for column in wanted:
        if column in found and column not in names and re.sub(r"_\d+$", "", column) in names:
            raise DataError(f"input {name} has no column {column}. Correct the schema")


def _read_names(
    connection: duckdb.DuckDBPyConnection, files: InputFiles, name: str, csv: str
) -> list[str]:
    """Return the names of a file's columns as written in it."""
    if files.kind == "Parquet":
        with fsspec.open(name, "rb") as file:
            names: list[str] = pq.read_schema(file).names
        return names
    if files.kind == "JSON":
        objects = f"read_ndjson_objects({format_paths([name])})"
        query = f"SELECT DISTINCT unnest(json_keys(json)) FROM {objects} ORDER BY 1"
        return [row[0] for row in connection.execute(query).fetchall()]
    table = format_scan(files, [name], f"{csv}, header = false, all_varchar = true")
    return [str(value) for value in connection.execute(f"FROM {table} LIMIT 1").fetchall()[0]]
