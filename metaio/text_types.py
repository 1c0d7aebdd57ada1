"""Which types are asked of text files. DuckDB guesses them by the first rows of the first file and
holds all rows to them: 9.5 among integers becomes 10, a time among dates loses its hour.
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
    """The guessed types, but for labels and dense columns, which may have decimals later."""
    asked = {column: guessed[column] for column in schema.columns}
    ids = {schema.task.column, schema.splits.column, *(c.column for c in schema.sparse)}
    numbers = {schema.label.column, *(c.column for c in schema.dense)}
    time = None if schema.time is None else schema.time.column
    for column, kind in asked.items():
        if column in numbers - ids - {time} and kind in _WHOLE:
            asked[column] = "DOUBLE"
    return asked


def revealing_types(types: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """For each column of integers (ids, and times that began as such) or dates: as which type to
    read it to see what would be lost, and the SQL condition that something would. Dates are no
    timestamps: DuckDB finds out how they are written for the type that it guessed alone.
    """
    whole = {
        column: ("DOUBLE", "{0} <> floor({0})") for column, kind in types.items() if kind in _WHOLE
    }
    dates = {
        column: ("VARCHAR", "contains({0}, ':')")
        for column, kind in types.items()
        if kind == "DATE"
    }
    return whole | dates


def loss_refusal(schema: Schema, column: str, value: float | str) -> str:
    """Why a value ends prepare among integers or dates that would lose a part of it."""
    if isinstance(value, str):
        return (
            f"column {column} holds {value!r}, but its first rows hold dates, and as one it would "
            "lose its hour. Write all of its times alike"
        )
    return _rounding_refusal(schema, column, value)


def _rounding_refusal(schema: Schema, column: str, value: float) -> str:
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
