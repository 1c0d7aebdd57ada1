"""CSV and JSON lines as `gmeta prepare` reads them, for models that wait for rows in Parquet."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gmeta.serving.bulk.row_files import RowFiles
from gmeta.serving.exported_folder import ExportedConfig
from metaio.errors import MetaIOError
from metaio.format.atomic_folder import open_temporary_folder
from metaio.prepare.job import DEFAULT_MEMORY_BYTES
from metaio.prepare.schema.rules import SplitRule
from metaio.prepare.schema.schema import DenseColumn, IdColumn, LabelColumn, Schema, TaskColumn
from metaio.prepare.source.input_files import list_file_names
from metaio.prepare.source.source import DuckSource

_TEXT = re.compile(r".+\.(csv|tsv|txt|jsonl|ndjson|json)(\.gz|\.zst)?|.+\.zip", re.IGNORECASE)


@contextmanager
def open_rows(given: Sequence[str], config: ExportedConfig, labelled: bool) -> Iterator[RowFiles]:
    """Yield the rows of Parquet files, or of text files as Parquet that is removed at the end."""
    names = []
    for name in given:
        one = [name] if "," not in name or os.path.exists(name) else name.split(",")
        names += [part.strip() for part in one]
    try:
        found = list_file_names(names)
    except (MetaIOError, OSError):
        found = []  # RowFiles says what is wrong
    if not any(map(_TEXT.fullmatch, found)):
        yield RowFiles(*given)
        return
    schema = _describe_rows(config, labelled)
    with open_temporary_folder() as folder:
        file, threads = Path(folder, "rows.parquet"), os.cpu_count() or 1
        memory_bytes = DEFAULT_MEMORY_BYTES
        with DuckSource(names, schema, memory_bytes=memory_bytes, threads=threads) as source:
            source.survey()
            batches = source.read_all_columns()
            first = next(batches)
            with pq.ParquetWriter(file, first.schema) as writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)
            rows = RowFiles(str(file))
            rows.names = source.given
        yield rows


def _describe_rows(config: ExportedConfig, labelled: bool) -> Schema:
    """Return what DuckDB must know of the rows of one side."""
    columns, features = config.columns, config.features
    schema = columns.schema
    if schema is None:  # rows hold ids of the tables already
        schema = Schema(
            task=TaskColumn(columns.task),
            label=LabelColumn(columns.label),
            single=tuple(IdColumn(one.name, hash=2, type="integer") for one in features.single),
            multi=tuple(IdColumn(one.name, hash=2) for one in features.multi),
            dense=tuple(DenseColumn(name) for name in features.dense),
        )
    kinds = columns.kinds
    # Rows to predict have no split, side or order of their own.
    unused: Any = dict.fromkeys(
        ("time", "row_id", "membership", "negatives", "stream", "item", "transform")
    )
    if not labelled:
        unused |= {"label": LabelColumn(schema.task.column), "weight": None}
    single = tuple(replace(c, type=kinds.get(c.column, c.type)) for c in schema.single)
    # Each row gets its prediction: none is left out.
    text = None if schema.text is None else replace(schema.text, bad_lines=None)
    return replace(schema, splits=SplitRule(), single=single, text=text, **unused)
