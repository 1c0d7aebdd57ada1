"""Files of one log whose columns differ, read as one table: some lack a column, or hold it in a
narrower type."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from metaio.prepare.source.sql import quote_column

_INTEGER = re.compile(r"(U?)(TINY|SMALL|BIG|)INT(?:EGER)?")
_BITS = {"TINY": 8, "SMALL": 16, "": 32, "BIG": 64}
_SIGNED = {8: "TINYINT", 16: "SMALLINT", 32: "INTEGER", 64: "BIGINT"}


class FileGroup(NamedTuple):
    """Files with the same differences from the others."""

    names: tuple[str, ...]
    absent: dict[str, str]  # SQL type of each column that they lack: all of its values are null
    casts: dict[str, str]  # SQL type that a column is widened to


def group_files(
    names: Iterable[str],
    absent_of: Mapping[str, Sequence[str]],
    casts_of: Mapping[str, Mapping[str, str]],
    types: Mapping[str, str],
) -> list[FileGroup]:
    """Return the files in groups, each in the order given; a single one where none differs."""
    found: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], list[str]] = {}
    for name in names:
        casts = sorted(casts_of.get(name, {}).items())
        found.setdefault((tuple(absent_of.get(name, ())), tuple(casts)), []).append(name)
    return [
        FileGroup(tuple(own), {c: types[c] for c in absent if c in types}, dict(casts))
        for (absent, casts), own in found.items()
    ]


def format_group(group: FileGroup, table: str) -> str:
    """Return the query for all columns of the files of a group, which the table function `table`
    reads."""
    casts = ", ".join(
        f"CAST({quote_column(name)} AS {kind}) AS {quote_column(name)}"
        for name, kind in group.casts.items()
    )
    query = f"SELECT *{f' REPLACE ({casts})' if casts else ''}"
    for name, kind in group.absent.items():
        query += f", CAST(NULL AS {kind}) AS {quote_column(name)}"
    return f"{query} FROM {table}"


def find_wider_type(one: str, other: str, as_number: bool) -> str | None:
    """Return the SQL type that holds all values of both, so that equal values stay equal; None if
    there is none. Only `as_number` do integers become floats.

    >>> find_wider_type("INTEGER", "BIGINT", False), find_wider_type("UINTEGER", "INTEGER", False)
    ('BIGINT', 'BIGINT')
    >>> find_wider_type("FLOAT[]", "DOUBLE[]", True), find_wider_type("BIGINT", "VARCHAR", True)
    ('DOUBLE[]', None)"""
    if one.endswith("[]") and other.endswith("[]"):
        inner = find_wider_type(one[:-2], other[:-2], as_number)
        return None if inner is None else f"{inner}[]"
    if one == other:
        return one
    integers = [_INTEGER.fullmatch(kind) for kind in (one, other)]
    are_numbers = all(
        whole or kind in ("FLOAT", "DOUBLE")
        for whole, kind in zip(integers, (one, other), strict=True)
    )
    if not are_numbers:
        return None
    if not integers[0] or not integers[1]:
        return "DOUBLE" if as_number or not any(integers) else None
    unsigned, bits = zip(
        *((bool(part[1]), _BITS[part[2]]) for part in integers if part), strict=True
    )
    if unsigned[0] == unsigned[1]:
        return one if bits[0] > bits[1] else other
    # A signed type needs a bit more than an unsigned one.
    return _SIGNED.get(
        max(size * (2 if alone else 1) for alone, size in zip(unsigned, bits, strict=True))
    )
