"""Builds the SQL that DuckDB reads inputs by, with names and values escaped."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

import duckdb

from metaio.prepare.schema.schema import TextRule
from metaio.prepare.source.input_files import InputFiles

_MARKS, _MARKS_OF_WEB = re.compile(r"[*?[]"), re.compile(r"[*[]")


def connect(inputs: InputFiles, folder: str) -> duckdb.DuckDBPyConnection:
    """Return a connection that reads these files; what does not fit in memory goes to `folder`."""
    connection = duckdb.connect()
    for fs in inputs.file_systems:
        if "http" in fs.protocol:
            # DuckDB requests the time of change first, which fsspec does not know of a web server.
            fs.modified = lambda path: datetime.fromtimestamp(0, UTC)
        connection.register_filesystem(fs)
    # Times that name no zone are UTC on every machine.
    connection.execute("SET TimeZone = 'UTC'")
    # gmeta prints its own progress.
    connection.execute("SET enable_progress_bar = false")
    # The default is .tmp in the working folder, which may be read-only and survives a kill.
    connection.execute(f"SET temp_directory = {quote_literal(folder)}")
    return connection


def format_scan(
    inputs: InputFiles, names: Iterable[str], csv: str, json: str = "", folders: bool | None = None
) -> str:
    """Return the table function that reads some of the files, with options by their kind."""
    # None leaves it to DuckDB: columns of folders such as day=1, if all files have them.
    hive = "" if folders is None else f", hive_partitioning = {str(folders).lower()}"
    if inputs.kind == "Parquet":
        return f"read_parquet({format_paths(names)}{hive})"
    if inputs.kind == "JSON":
        return f"read_json({format_paths(names)}, format = 'newline_delimited'{json}{hive})"
    return f"read_csv({format_paths(names)}, {csv}{hive})"


def quote_literal(text: str) -> str:
    """Return a text as a SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def quote_column(column: str) -> str:
    """Return a column as a SQL name."""
    return '"' + column.replace('"', '""') + '"'


def format_text_options(rule: TextRule) -> str:
    """Return the options of read_csv that decide what is a line and what is a null."""
    # If not set, DuckDB looks for a comment mark, and drops lines that begin with #.
    return (
        f"comment = {quote_literal(rule.comment)}, encoding = {quote_literal(rule.encoding)}, "
        f"nullstr = {format_list(('', *rule.null))}, max_line_size = {rule.max_line_bytes}"
    )


def format_list(values: Iterable[str]) -> str:
    """Return texts as a SQL list."""
    return "[" + ", ".join(quote_literal(value) for value in values) + "]"


def format_paths(names: Iterable[str]) -> str:
    """Return files as a SQL list; DuckDB takes names for globs."""
    return format_list(map(escape_glob, names))


def escape_glob(name: str) -> str:
    """Return the glob that matches the file of this name alone.

    >>> escape_glob("day[1].csv")
    'day[[]1].csv'"""
    # In the address of a web server fsspec takes ? literally.
    marks = _MARKS_OF_WEB if name.startswith(("http://", "https://")) else _MARKS
    return marks.sub(r"[\g<0>]", name)


def format_struct(types: dict[str, str]) -> str:
    """Return columns' types as a SQL struct."""
    fields = (f"{quote_literal(name)}: {quote_literal(kind)}" for name, kind in types.items())
    return "{" + ", ".join(fields) + "}"
