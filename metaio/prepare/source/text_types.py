"""Chooses the types by which text and JSON files are read, so that no value loses anything."""

# DuckDB guesses types by the first rows and holds all rows to them: 9.5 among integers becomes 10,
# 007 becomes 7, a time among dates loses its hour, one among zoned times its zone.
import re
from collections.abc import Mapping

from metaio.errors import DataError
from metaio.prepare.schema.schema import IdColumn, Schema, TaskColumn
from metaio.prepare.source.input_files import FileKind
from metaio.prepare.source.sql import quote_column

_WHOLE = ("BIGINT", "HUGEINT", "UBIGINT")
ZONED = "TIMESTAMP WITH TIME ZONE"
# Names have three letters or more: AM and PM are no zones.
_NAMES_ZONE = r"regexp_matches({0}, '\d\s*([Zz]|[A-Za-z]{3}[\w/+-]*|[+-]\d\d(:?\d\d)?)\s*$')"
_NAMES_UTC = r"regexp_matches({0}, '\d\s*([Zz]|(Etc/)?(UTC|UCT|GMT)|Zulu)\s*$')"
# DuckDB's types of JSON columns without a value, or of empty lists; None: no such column.
OF_NO_VALUE = (None, '"NULL"', '"NULL"[]', "JSON[]")
# How integers are written; pandas adds .0 in a column that has a null elsewhere.
_INTEGER = r"\s*-?(0|[1-9]\d*)(\.0*)?\s*"
# True if a truth value is spelled in two ways.
_SPELLINGS = "count(DISTINCT lower({0})) > count(DISTINCT TRY_CAST({0} AS BOOLEAN))"
# How spreadsheets write a long number; with a sign, as no hexadecimal id has.
_CUT = r"\s*\d(\.\d+)?[eE]\+\d+\s*"
_ALIKE = "Write all of its times alike"
_SQL_TYPES = {"integer": "BIGINT", "text": "VARCHAR"}


def list_declared_types(schema: Schema) -> dict[str, str]:
    """Return the SQL types that the schema says, by column."""
    columns: list[TaskColumn | IdColumn] = [schema.task, *schema.single]
    sql_types = {column.column: _SQL_TYPES[column.type] for column in columns if column.type}
    if schema.time is not None and schema.time.format is not None:
        sql_types[schema.time.column] = "VARCHAR"
    # Lists to split are text, even if no row of the first file has more than one value.
    return sql_types | {c.column: "VARCHAR" for c in schema.multi if c.separator is not None}


def choose_null_type(schema: Schema, column: str) -> str:
    """Return the SQL type of a JSON column without a value in the first rows of any file."""
    if column in {c.column for c in schema.vector}:
        return "DOUBLE[]"
    return "VARCHAR[]" if column in {c.column for c in schema.multi} else "VARCHAR"


def _list_id_columns(schema: Schema) -> set[str | None]:
    row_id = None if schema.row_id is None else schema.row_id.column
    sparse = (column.column for column in schema.sparse)
    return {schema.task.column, row_id, *sparse}


def list_number_columns(schema: Schema) -> set[str]:
    """Return the columns that hold numbers alone, in which 1 and 1.0 are the same."""
    numbers = {*schema.label_columns, *(c.column for c in schema.dense)}
    numbers |= {c.column for c in schema.vector}
    return numbers - _list_id_columns(schema) - {schema.time.column if schema.time else ""}


def choose_types(schema: Schema, guessed: Mapping[str, str], file_kind: FileKind) -> dict[str, str]:
    """Return the types to read columns by: the guessed ones, except where later rows may differ."""
    # As UUID it would be rewritten in lower case, unlike other rows and requests.
    chosen = {column: guessed[column].replace("UUID", "VARCHAR") for column in schema.columns}
    ids = _list_id_columns(schema)
    numbers = {*schema.label_columns, *(c.column for c in schema.dense)}
    vectors = {c.column for c in schema.vector}
    time = None if schema.time is None else schema.time.column
    for id_name in (schema.task.column, *(c.column for c in schema.single)):
        if chosen[id_name] == "DOUBLE":
            raise DataError(
                f"column {id_name} holds numbers such as 1.0; ids are integers or text. "
                'If they are integers, set type = "integer" beside the column in the schema, else '
                'type = "text"'
            )
    # Text in the first rows of these may just mean that they have no value there.
    may_be_null = {c.column for c in schema.dense if c.fill is not None}
    may_be_null |= {label.column for label in schema.labels if not label.is_always_known}
    # Labels and dense columns may have decimals later; integers may exceed 64 bits (survey()).
    for column, kind in chosen.items():
        # In text files a line that cannot be read may be one of the first.
        unknown = "VARCHAR" if column in may_be_null or file_kind == "text" else "JSON"
        if column in numbers - ids - {time} and kind in (*_WHOLE, "JSON", unknown):
            chosen[column] = "DOUBLE"
        elif column in vectors and kind in {f"{whole}[]" for whole in _WHOLE}:
            chosen[column] = "DOUBLE[]"
        elif column == schema.splits.column and column not in ids:
            chosen[column] = "VARCHAR"  # its values are names
        elif kind in _WHOLE:
            chosen[column] = "BIGINT"
    return chosen


def choose_revealing_types(
    schema: Schema, types: Mapping[str, str], file_kind: FileKind
) -> dict[str, tuple[str, str]]:
    """Return by column the type that shows losses, and the SQL of one value that suffers one."""
    # Dates are not read as timestamps: DuckDB finds their format only for the guessed type.
    conditions = {
        "BIGINT": ("DOUBLE", "{0} <> floor({0})"),
        # In JSON any number but 0 would be true.
        "BOOLEAN": ("VARCHAR", "TRY_CAST({0} AS DOUBLE) NOT IN (0, 1)"),
        "DATE": ("VARCHAR", "contains({0}, ':')"),
    }
    of_ids = {
        "BIGINT": ("VARCHAR", f"NOT regexp_full_match({{0}}, '{_INTEGER}')"),
        "BOOLEAN": ("VARCHAR", "lower({0}) NOT IN ('true', 'false')"),
    }
    time = "" if schema.time is None else schema.time.column
    cut = f"contains(upper({{0}}), 'E+') AND regexp_full_match({{0}}, '{_CUT}')"
    # Not columns that the schema declares as integers.
    all_ids = _list_id_columns(schema)
    ids = all_ids - list_declared_types(schema).keys()
    zones = {"TIMESTAMP": _NAMES_ZONE, ZONED: f"NOT {_NAMES_ZONE}"}
    found = {}
    for column, kind in types.items():
        name, inner = quote_column(column), kind.removesuffix("[]")
        if column == time and kind in zones:
            lost = zones[kind].replace("{0}", name)
            value = f"min(CASE WHEN {lost} THEN {name} END)"
            if kind == "TIMESTAMP":  # DuckDB's guess for " UTC"; times without a zone are UTC too
                in_utc = _NAMES_UTC.replace("{0}", name)
                value = f"CASE WHEN NOT bool_and({in_utc}) THEN {value} END"
            found[column] = "VARCHAR", value
        elif file_kind == "text" and column in all_ids and (kind == "VARCHAR" or column not in ids):
            found[column] = "VARCHAR", f"min(CASE WHEN {cut.format(name)} THEN {name} END)"
        elif inner in conditions:
            strict = of_ids if file_kind == "text" and column in ids else {}
            read, lost = (conditions | strict)[inner]
            of_list = f"list_filter({name}, lambda x: {lost.format('x')})[1]"
            of_one = f"CASE WHEN {lost.format(name)} THEN {name} END"
            value = f"min({of_one if inner == kind else of_list})"
            if strict and kind == "BOOLEAN":  # yes and no alone lose nothing
                value = f"CASE WHEN {_SPELLINGS.format(name)} THEN {value} END"
            found[column] = kind.replace(inner, read), value
    return found


def explain_loss(schema: Schema, column: str, kind: str, value: float | str) -> str:
    """Return the message about a value that a column of the type `kind` would cut."""
    if isinstance(value, str) and re.fullmatch(_CUT, value):
        return (
            f"column {column} holds {value!r}, a number that a spreadsheet has cut to its first "
            "digits: different ids became one. Export the log anew, with that column as text"
        )
    before, loss, remedy = {
        "BIGINT": ("integers", "as one it would be rounded", "Write all with a decimal point"),
        "BOOLEAN": ("truth values", "as one it would be true", "Write numbers in all rows"),
        "DATE": ("dates", "as one it would lose its hour", _ALIKE),
        "TIMESTAMP": ("times without a zone", "it would lose its own", _ALIKE),
        ZONED: ("times with a zone", "it would be taken for UTC", _ALIKE),
    }[kind.removesuffix("[]")]
    if column in _list_id_columns(schema):
        loss, remedy = "as one it would be another id", "Write all of its values alike"
    if column in {schema.task.column, *(c.column for c in schema.single)}:
        remedy += ', or declare the column as text in the schema (type = "text")'
        if isinstance(value, str) and kind == "BIGINT" and "." not in value:
            remedy += ' or as integers, of which 007 is 7 (type = "integer")'
    return (
        f"column {column} holds {value!r}, but its first rows look like {before}, and {loss}. "
        f"{remedy}"
    )
