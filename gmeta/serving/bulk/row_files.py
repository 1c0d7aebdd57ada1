"""Rows in files, batch by batch: what `gmeta predict` and `gmeta adapt` read and write."""

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
from metaio.format.atomic_folder import flush_to_disk, open_exclusive_folder
from metaio.format.storage import find_file_system, is_local
from metaio.prepare.source.input_files import is_marker

CSV = ".csv"
# Rows of a batch. Files are read by row groups, whatever this is.
_BATCH_ROWS = 65_536


class RowFiles:
    """Parquet files of the same columns, in the order of their names."""

    def __init__(self, *names: str) -> None:
        """Find the files; each name is a path, URL, glob or folder, or several with commas."""
        self.names: list[str] = []
        self._places = []
        for one in names:
            with _translate_errors(one):
                for fs, path in _find_files(one):
                    self._places.append((fs, path))
                    self.names.append(path if is_local(fs) else fs.unstrip_protocol(path))
        # At once: files that differ are refused before any row is read.
        self._heads = [self._read_head(*place) for place in self._places]
        self.schema: pa.Schema = self._heads[0][0]
        for name, (schema, _) in zip(self.names, self._heads, strict=True):
            if not schema.equals(self.schema):
                raise UserError(
                    f"{name} has columns {_format_schema(schema)}; {self.names[0]} has "
                    f"{_format_schema(self.schema)}. Make the files agree"
                )

    @cached_property
    def num_rows(self) -> int:
        """Return how many rows all files hold."""
        return sum(num_rows for _, num_rows in self._heads)

    def batches(
        self, columns: list[str] | None = None, most_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows in their order, with these columns or all, so many in a batch at most."""
        batch_rows = most_rows or _BATCH_ROWS
        for fs, path in self._places:
            with _translate_errors(path), fs.open(path) as file:
                parquet = pq.ParquetFile(file)
                # Not all at once: Arrow keeps the bytes of all row groups that a call reads.
                for groups in _cut_groups(parquet.metadata, batch_rows):
                    yield from parquet.iter_batches(batch_rows, row_groups=groups, columns=columns)

    def _read_head(self, fs: Any, path: str) -> tuple[pa.Schema, int]:
        with _translate_errors(path), fs.open(path) as file:
            parquet = pq.ParquetFile(file)
            return parquet.schema_arrow, parquet.metadata.num_rows


def _cut_groups(metadata: pq.FileMetaData, num_rows: int) -> Iterator[list[int]]:
    """Yield runs of row groups of so many rows or more."""
    run, rows_of_run = list[int](), 0
    for group in range(metadata.num_row_groups):
        run.append(group)
        rows_of_run += metadata.row_group(group).num_rows
        if rows_of_run >= num_rows:
            yield run
            run, rows_of_run = [], 0
    if run:
        yield run


@contextmanager
def atomic_output(out: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for work under way, and the file in it that becomes `out` at the end."""
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_exclusive_folder(out.parent / f".{out.name}.partial", str(out)) as folder:
        written = folder / "written"
        yield folder, written
        flush_to_disk([written])
        # On the disk before it has its name: a power cut leaves the old file or the new one.
        written.replace(out)
        # The folder, too, which holds the file's name.
        flush_to_disk([out.parent])


def open_writer(path: Path, schema: pa.Schema, suffix: str) -> csv.CSVWriter | pq.ParquetWriter:
    """Return a writer of record batches to a file of the kind that the suffix names."""
    return csv.CSVWriter(path, schema) if suffix == CSV else pq.ParquetWriter(path, schema)


def check_fits(schema: pa.Schema, out: Path) -> None:
    """Raise UserError for a column that the file to be written cannot hold."""
    if out.suffix != CSV:
        return
    unfit = pa.types.is_nested, pa.types.is_string_view, pa.types.is_binary_view
    for field in schema:
        kind = field.type
        if any(is_such(kind) for is_such in unfit):
            raise UserError(
                f"column {field.name} has type {kind}, which CSV cannot hold: name a file "
                "that ends with .parquet, or drop the column"
            )


def _find_files(name: str) -> Iterator[tuple[Any, str]]:
    fs, path = find_file_system(name)
    # A file's own name may hold a comma, as one of a glob may hold the marks below.
    if "," in name and not fs.exists(path):
        for part in name.split(","):
            yield from _find_files(part.strip())
        return
    if fs.isdir(path):
        # What an interrupted run has left is in a hidden folder of its own.
        paths = [each for each in sorted(fs.find(path)) if not is_marker(each, path)]
    elif any(mark in path for mark in "*?[") and not fs.exists(path):
        paths = [each for each in sorted(fs.glob(path)) if not is_marker(each, path)]
    else:
        paths = [path]
    if not paths:
        what = f"folder {name} holds no file" if fs.isdir(path) else f"no file matches {name}"
        raise UserError(f"{what}. Check the path")
    yield from ((fs, each) for each in paths)


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist. Check the path") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{name} cannot be read as Parquet: {str(error).splitlines()[0].rstrip('.')}. "
            "Give a Parquet file that is whole"
        ) from error


def _format_schema(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
