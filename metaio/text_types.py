"""Which types are asked of text files. DuckDB guesses them by the first rows of the first file and
holds all rows to them: 9.5 among integers becomes 10, the hour of a time among dates is dropped.
Nothing may be lost that way.
"""

from collections.abc import Mapping

from metaio.schema import Schema, SparseColumn, TaskColumn

_WHOLE = ("BIGINT", "HUGEINT")
_SQL_TYPES = {"integer": "BIGINT", "text": "VARCHAR"}


def declared_types(schema: Schema) -> dict[str, str]:
    """SQL types that the schema says, by column."""
    columns: list[TaskColumn | SparseColumn] = [schema.task, *schema.single]
    said = {column.column: _SQL_TYPES[column.type] for column in columns if column.type}
    # What is to be split is text, also where no row of the first file has more than one value.
    return said | {c.column: "VARCHAR" for c in schema.multi if c.separator is not None}


def asked_types(schema: Schema, guessed: Mapping[str, str]) -> dict[str, str]:
    """The guessed types, wider where a later row may hold more: numbers that are read as such may
    have decimals, dates an hour.
    """
    asked = {column: guessed[column] for column in schema.columns}
    ids = {schema.task.column, schema.splits.column, *(c.column for c in schema.sparse)}
    numbers = {schema.label.column, *(c.column for c in schema.dense)}
    time = None if schema.time is None else schema.time.column
    for column, kind in asked.items():
        if column in numbers - ids - {time} and kind in _WHOLE:
            asked[column] = "DOUBLE"
        if column == time and column not in ids and kind == "DATE":
            asked[column] = "TIMESTAMP"
    return asked


def whole_columns(types: Mapping[str, str]) -> list[str]:
    """The columns that are read as integers: ids, and times that began as such."""
    return [column for column, kind in types.items() if kind in _WHOLE]


def rounding_refusal(schema: Schema, column: str, value: float) -> str:
    """Why a number with decimals ends prepare in a column of integers."""
    can_declare = column in {schema.task.column, *(c.column for c in schema.single)}
    remedy = (
        'declare the column as text in the schema (type = "text")'
        if can_declare
        else "write all of its numbers with a decimal point"
    )
    return (
        f"column {column} holds {value!r}, but its first rows hold integers, and as one it would "
        f"be rounded. Correct that row, or {remedy}"
    )
