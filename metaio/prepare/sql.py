"""How inputs are asked of DuckDB: its connection, and words of its SQL, with what would end them
escaped.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

import duckdb

from metaio.prepare.inputs import Inputs
from metaio.prepare.schema import TextRule

_MARKS, _MARKS_OF_WEB = re.compile(r"[*?[]"), re.compile(r"[*[]")


def connected(inputs: Inputs, folder: str) -> duckdb.DuckDBPyConnection:
    """Return a connection that reads these files; what does not fit in memory lies in `folder`."""
    connection = duckdb.connect()
    for fs in inputs.file_systems:
        if "http" in fs.protocol:
            # DuckDB asks for it before it reads; fsspec does not know it of a web server.
            fs.modified = lambda path: datetime.fromtimestamp(0, UTC)
        connection.register_filesystem(fs)
    # Times that name no zone are UTC on every machine.
    connection.execute("SET TimeZone = 'UTC'")
    # gmeta has its own.
    connection.execute("SET enable_progress_bar = false")
    # Without it: .tmp in the working folder, which may be read-only, and stays after a kill.
    connection.execute(f"SET temp_directory = {quoted(folder)}")
    return connection


def scan(
    inputs: Inputs, names: Iterable[str], csv: str, json: str = "", folders: bool | None = None
) -> str:
    """Return the table function that reads some of the files; `csv` and `json` are options of files
    of these kinds. `folders` tells whether those such as day=1 are columns; None: if all have them.
    """
    hive = "" if folders is None else f", hive_partitioning = {str(folders).lower()}"
    if inputs.kind == "Parquet":
        return f"read_parquet({paths(names)}{hive})"
    if inputs.kind == "JSON":
        return f"read_json({paths(names)}, format = 'newline_delimited'{json}{hive})"
    return f"read_csv({paths(names)}, {csv}{hive})"


def strict_csv(name: str, options: str, delimiter: str, fields: Iterable[str]) -> str:
    """Return the table function that reads a file as text of these fields, and no line of others:
    where rows differ in length DuckDB itself may take each line for one field."""
    return (
        f"read_csv({paths([name])}, {options}, auto_detect = false, delim = '{delimiter}', "
        f"quote = '\"', escape = '\"', header = true, "
        f"columns = {struct(dict.fromkeys(fields, 'VARCHAR'))})"
    )


def quoted(text: str) -> str:
    """Return a text as a literal."""
    return "'" + text.replace("'", "''") + "'"


def column_name(column: str) -> str:
    """Return a column as a name."""
    return '"' + column.replace('"', '""') + '"'


def text_options(rule: TextRule) -> str:
    """Return the options of read_csv that decide what is a line and what is a null."""
    # Without a comment DuckDB would look for one, and leave out lines that begin with #.
    return (
        f"comment = {quoted(rule.comment)}, encoding = {quoted(rule.encoding)}, "
        f"nullstr = {listed(('', *rule.null))}, max_line_size = {rule.max_line_bytes}"
    )


def listed(values: Iterable[str]) -> str:
    """Return texts as a list."""
    return "[" + ", ".join(quoted(value) for value in values) + "]"


def paths(names: Iterable[str]) -> str:
    """Return files as a list: DuckDB takes names for globs."""
    return listed(map(literal, names))


def literal(name: str) -> str:
    """Return the glob that matches the file of this name alone.

    >>> literal("day[1].csv")
    'day[[]1].csv'
    """
    # In the address of a web server ? is no mark: fsspec takes it for what it is.
    marks = _MARKS_OF_WEB if name.startswith(("http://", "https://")) else _MARKS
    return marks.sub(r"[\g<0>]", name)


def struct(types: dict[str, str]) -> str:
    """Return columns' types as a struct."""
    return "{" + ", ".join(f"{quoted(name)}: {quoted(kind)}" for name, kind in types.items()) + "}"
