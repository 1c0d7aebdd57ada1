"""How inputs are asked of DuckDB: its connection, and words of its SQL, with what would end them
escaped.
"""

from collections.abc import Iterable

import duckdb

from metaio.prepare.inputs import Inputs


def connected(inputs: Inputs) -> duckdb.DuckDBPyConnection:
    """Return a connection that reads these files."""
    connection = duckdb.connect()
    for fs in inputs.file_systems:
        connection.register_filesystem(fs)
    # Times that name no zone are UTC on every machine.
    connection.execute("SET TimeZone = 'UTC'")
    # gmeta has its own.
    connection.execute("SET enable_progress_bar = false")
    return connection


def scan(inputs: Inputs, names: Iterable[str], csv: str, json: str = "") -> str:
    """Return the table function that reads some of the files; `csv` and `json` are options of files
    of these kinds.
    """
    if inputs.kind == "Parquet":
        return f"read_parquet({listed(names)})"
    if inputs.kind == "JSON":
        return f"read_json({listed(names)}, format = 'newline_delimited'{json})"
    return f"read_csv({listed(names)}, {csv})"


def quoted(text: str) -> str:
    """Return a text as a literal."""
    return "'" + text.replace("'", "''") + "'"


def column_name(column: str) -> str:
    """Return a column as a name."""
    return '"' + column.replace('"', '""') + '"'


def listed(values: Iterable[str]) -> str:
    """Return texts as a list."""
    return "[" + ", ".join(quoted(value) for value in values) + "]"


def struct(types: dict[str, str]) -> str:
    """Return columns' types as a struct."""
    return "{" + ", ".join(f"{quoted(name)}: {quoted(kind)}" for name, kind in types.items()) + "}"
