"""Recipes that are a table and a schema: they go the way of everybody's own data, through prepare,
and so carry vocabularies with which a model reads raw rows.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from metaio.errors import DataError
from metaio.format.destination import passing_folder
from metaio.prepare.job import PrepareOptions
from metaio.prepare.local import prepare
from metaio.prepare.schema_file import parse_schema

_WORD = re.compile(r"[a-z0-9']+")


def prepare_table(
    table: pa.Table,
    out: str,
    schema: dict[str, Any],
    recipe: dict[str, Any],
    protocol: str,
    overwrite: bool,
) -> None:
    """Write the dataset at URL `out` from a table and a schema as TOML has it; the manifest says
    `recipe` and `protocol` beside the schema.

    Raises:
        DataError: `out` exists, or the disk is full.
    """
    options = PrepareOptions(overwrite=overwrite, recipe=recipe, protocol=protocol)
    with passing_folder() as folder:
        path = Path(folder) / "rows.parquet"
        pq.write_table(table, path)
        prepare([str(path)], out, parse_schema(schema), options)


def read_fields(path: Path, separator: str, num_fields: int, source: str) -> list[list[str]]:
    """Return the fields of each line that is not blank; files are UTF-8 or Latin-1.

    Raises:
        DataError: the file is missing or empty, or a line has another number of fields.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist. Point PATH at the unpacked {source} folder")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    found = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        fields = line.split(separator)
        if line and len(fields) != num_fields:
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields, {num_fields} separated by "
                f"{separator!r} are expected. Download the file again"
            )
        if line:
            found.append(fields)
    if not found:
        raise DataError(f"{path} is empty. Download {source} again")
    return found


def whole_number(text: str, path: Path, what: str) -> int:
    """Return a field as an integer; decimals of 0 are allowed, as some copies write `5.0`.

    Raises:
        DataError: it is none.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        value = float(text)
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path} holds {what} {text!r}; a whole number is needed. Correct that line"
        ) from error
    return int(value)


def known_words(titles: Iterable[str]) -> list[str | None]:
    """Return the words of each title that another title has too, separated by spaces; None where
    there are none.

    A word of a single title would be another id of that item.
    """
    words = [list(dict.fromkeys(_WORD.findall(title.lower()))) for title in titles]
    counts = Counter(word for title in words for word in title)
    return [" ".join(word for word in title if counts[word] > 1) or None for title in words]
