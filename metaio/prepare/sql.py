"""Words of DuckDB's SQL, with what would end them escaped."""

from collections.abc import Iterable


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
