"""Rows in files, batch by batch: what `gmeta predict` and `gmeta adapt` read and write. Reads
Parquet from paths, globs and folders of any fsspec URL; writes Parquet or CSV, by the suffix.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from gmeta.errors import UserError
from metaio.format.destination import flush_to_disk, folder_of_one_writer
from metaio.format.storage import file_system, is_local
from metaio.prepare.inputs import is_marker

CSV = ".csv"
# Rows of a batch. Files are read by row groups, whatever this is.
_BATCH_ROWS = 65_536


class RowFiles:
    """Parquet files of the same columns, in the order of their names.

    Each of `given` is a path or URL, a glob, a folder, or several of them with commas between.
    """

    def __init__(self, *given: str) -> None:
        """Find the files and read their heads."""
        self.names: list[str] = []
        self._places = []
        for one in given:
            with _told(one):
                for fs, path in _found(one):
                    self._places.append((fs, path))
                    self.names.append(path if is_local(fs) else fs.unstrip_protocol(path))
        self._heads = [self._head(*place) for place in self._places]
        self.schema: pa.Schema = self._heads[0][0]
        for name, (schema, _) in zip(self.names, self._heads, strict=True):
            if not schema.equals(self.schema):
                raise UserError(
                    f"{name} has columns {_shown(schema)}; {self.names[0]} has "
                    f"{_shown(self.schema)}. Make the files agree"
                )

    @cached_property
    def num_rows(self) -> int:
        """Return how many rows all files hold."""
        return sum(num_rows for _, num_rows in self._heads)

    def batches(self, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows in their order, with these columns or all."""
        for fs, path in self._places:
            with _told(path), fs.open(path) as file:
                yield from pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=columns)

    def _head(self, fs: Any, path: str) -> tuple[pa.Schema, int]:
        with _told(path), fs.open(path) as file:
            found = pq.ParquetFile(file)
            return found.schema_arrow, found.metadata.num_rows


@contextmanager
def whole_output(out: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for work under way, and the file in it that becomes `out` when the block ends
    without an error; else nothing is left."""
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_of_one_writer(out.parent / f".{out.name}.partial", str(out)) as folder:
        written = folder / "written"
        yield folder, written
        flush_to_disk([written])
        written.replace(out)
        flush_to_disk([out.parent])


def writer_of(path: Path, schema: pa.Schema, suffix: str) -> csv.CSVWriter | pq.ParquetWriter:
    """Return a writer of record batches to a file of the kind that the suffix names."""
    return csv.CSVWriter(path, schema) if suffix == CSV else pq.ParquetWriter(path, schema)


def check_fits(schema: pa.Schema, out: Path) -> None:
    """Raise UserError for a column that the file to be written cannot hold."""
    if out.suffix != CSV:
        return
    for field in schema:
        kind = field.type
        if (
            pa.types.is_nested(kind)
            or pa.types.is_string_view(kind)
            or pa.types.is_binary_view(kind)
        ):
            raise UserError(
                f"column {field.name} has type {kind}, which CSV cannot hold: name a file "
                "that ends with .parquet, or drop the column"
            )


def _found(given: str) -> Iterator[tuple[Any, str]]:
    fs, path = file_system(given)
    if "," in given and not fs.exists(path):
        for part in given.split(","):
            yield from _found(part.strip())
        return
    if fs.isdir(path):
        # What an interrupted run has left is in a hidden folder of its own.
        paths = [each for each in sorted(fs.find(path)) if not is_marker(each, path)]
    elif any(mark in path for mark in "*?[") and not fs.exists(path):
        paths = [each for each in sorted(fs.glob(path)) if not is_marker(each, path)]
    else:
        paths = [path]
    if not paths:
        what = f"folder {given} holds no file" if fs.isdir(path) else f"no file matches {given}"
        raise UserError(f"{what}. Check the path")
    yield from ((fs, each) for each in paths)


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist. Check the path") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{name} cannot be read as Parquet: {str(error).splitlines()[0].rstrip('.')}. "
            "Give a Parquet file that is whole"
        ) from error


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
