"""Recipes that are a table and a schema: like users' own data they go through prepare."""

# So they carry vocabularies, by which a model reads raw rows.
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from metaio.format.atomic_folder import open_temporary_folder
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema

_WORD = re.compile(r"[a-z0-9']+")


def prepare_table(
    table: pa.Table,
    out: str,
    schema: dict[str, Any],
    recipe: dict[str, Any],
    protocol: str,
    overwrite: bool,
) -> None:
    """Write the dataset at URL `out` from a table and a schema, as tables of TOML."""
    options = PrepareOptions(overwrite=overwrite, recipe=recipe, protocol=protocol)
    with open_temporary_folder() as folder:
        path = Path(folder) / "rows.parquet"
        pq.write_table(table, path)
        prepare([str(path)], out, parse_schema(schema), options)


def keep_shared_words(titles: Iterable[str]) -> list[str | None]:
    """Return the words of each title that another title has too, space-separated; None for none."""
    words = [list(dict.fromkeys(_WORD.findall(title.lower()))) for title in titles]
    counts = Counter(word for title in words for word in title)
    # A word of a single title would be another id of that item.
    return [" ".join(word for word in title if counts[word] > 1) or None for title in words]
