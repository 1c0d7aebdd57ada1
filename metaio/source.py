"""Reads raw tables through DuckDB: CSV, TSV and Parquet on any fsspec URL, streamed as record
batches. DuckDB decides what the columns are; local Parquet of the same types comes from pyarrow.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import duckdb
import pyarrow as pa

from metaio import parquet_files
from metaio.encode import refuse_nulls
from metaio.errors import DataError
from metaio.schema import Schema
from metaio.storage import file_system, is_local
from metaio.text_types import asked_types, declared_types, loss_refusal, revealing_types

# 16,384 rows of 41 encoded columns are 3 MB, which stay in the second-level cache while their
# columns are filled in one by one: encoding takes 0.6 s a million rows, with 131,072 rows 1.5 s.
_BATCH_ROWS = 16_384
_REMEDY_FOR_TEXT = "Correct that row, or declare the column's type in the schema"
_REMEDY_FOR_PARQUET = "Write that file again"


@dataclass(frozen=True)
class _Files:
    """Expanded inputs of one format; `types` are SQL types by column, those of the first file."""

    names: list[str]
    parquet: bool


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _names_zone(kind: str) -> bool:
    return kind == "TIMESTAMP WITH TIME ZONE"


def _is_marker(path: str) -> bool:
    """Engines leave such as _SUCCESS beside their files."""
    return path.rsplit("/", 1)[-1].startswith(("_", "."))


def _expand(url: str) -> tuple[Any, list[str]]:
    """File system and files of a URL, glob or folder."""
    fs, path = file_system(url)
    if any(mark in path for mark in "*?["):
        matches = {p: info for p, info in fs.glob(path, detail=True).items() if not _is_marker(p)}
    else:
        matches = {path: fs.info(path)} if fs.exists(path) else {}
    if not matches:
        raise DataError(f"input {url} does not exist. Check the path")
    found: list[str] = []
    for match in sorted(matches):
        # "file" is taken at its word: an object store would be asked once more for each of them.
        if matches[match]["type"] == "file" or not fs.isdir(match):
            found.append(match)
            continue
        found += sorted(inside for inside in fs.find(match) if not _is_marker(inside))
    if not found:
        raise DataError(f"input {url} is a folder without files. Check the path")
    names = list(dict.fromkeys(found))  # "**" matches a folder, and what is in it once more
    for name in names:
        if fs.size(name) == 0:
            raise DataError(f"input {name} is empty. Remove it, or write its rows")
    if is_local(fs):
        return fs, names
    protocol = fs.protocol[0] if isinstance(fs.protocol, tuple) else fs.protocol
    return fs, [f"{protocol}://{name}" for name in names]


class DuckSource:
    """The raw rows of all inputs as one table. Use it as a context manager."""

    def __init__(
        self, inputs: list[str], schema: Schema, *, memory_bytes: int, threads: int
    ) -> None:
        self._schema = schema
        self._connection = duckdb.connect()
        self._run(f"SET memory_limit = '{memory_bytes // (1 << 20)}MiB'")
        self._run(f"SET threads = {threads}")
        # The order is decided later, by sorting; keeping this one would cost memory.
        self._run("SET preserve_insertion_order = false")
        # Times that name no zone are UTC on every machine.
        self._run("SET TimeZone = 'UTC'")
        # gmeta has its own.
        self._run("SET enable_progress_bar = false")
        self._time = None if schema.time is None else schema.time.column
        self._files = self._open(inputs)
        self._types = self._column_types(self._files.names[0], None)
        self._check_columns(self._files.names[0])
        for name in self._files.names[1:]:
            self._check_drift(name)
        if self._files.parquet:
            self._check_durations()
        # The first file's types are asked of all: a row that does not fit is refused by name
        # instead of turning a whole column into text.
        self._asked = {} if self._files.parquet else asked_types(schema, self._types)
        self._table = self._scan(self._files.names, self._asked)

    def _open(self, inputs: list[str]) -> _Files:
        names: list[str] = []
        for url in inputs:
            fs, found = _expand(url)
            # DuckDB reads local files by itself, everything else through fsspec.
            if "://" in found[0]:
                self._connection.register_filesystem(fs)
            names += found
        # One scan reads one format; two scans could give a column two types.
        kinds = {name.endswith((".parquet", ".pq")) for name in names}
        if len(kinds) != 1:
            raise DataError(
                "the inputs mix Parquet and text files. Prepare from one format at a time"
            )
        return _Files(names, kinds.pop())

    def _scan(self, names: list[str], types: dict[str, str] | None) -> str:
        listed = "[" + ", ".join(_quote(name) for name in names) + "]"
        if self._files.parquet:
            return f"read_parquet({listed})"
        options = declared_types(self._schema) | (types or {})
        if not options:
            return f"read_csv({listed})"
        typed = ", ".join(f"{_quote(column)}: {_quote(kind)}" for column, kind in options.items())
        return f"read_csv({listed}, types = {{{typed}}})"

    def _column_types(self, name: str, types: dict[str, str] | None) -> dict[str, str]:
        rows = self._fetch(f"DESCRIBE SELECT * FROM {self._scan([name], types)}", name)
        return {row[0]: row[1] for row in rows}

    def _check_columns(self, name: str) -> None:
        for column in self._schema.columns:
            if column not in self._types:
                near = difflib.get_close_matches(column, self._types, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(self._types)}."
                raise DataError(f"input {name} has no column {column}; {hint} Correct the schema")

    def _check_drift(self, name: str) -> None:
        first = self._files.names[0]
        wanted = {column: self._types[column] for column in self._schema.columns}
        types = self._column_types(name, None)
        for column, kind in wanted.items():
            if column not in types:
                raise DataError(
                    f"input {name} has no column {column}, but {first} has. Make the files agree"
                )
            # Types of text files are guessed from the first rows; rows that do not fit are refused
            # later. But the zone of a time would be dropped without a word.
            zones = _names_zone(types[column]) != _names_zone(kind) and column == self._time
            if types[column] != kind and (self._files.parquet or zones):
                raise DataError(
                    f"column {column} is {types[column]} in {name} and {kind} in {first}. "
                    "Cast one of them, so that all files agree"
                )

    def _check_durations(self) -> None:
        """Raise DataError for a column of durations: DuckDB takes them for integers, and a minute
        for 60,000,000,000 where the unit is the nanosecond.
        """
        listed = ", ".join(_quote(name) for name in self._files.names)
        found = self._fetch(
            f"SELECT file_name, value FROM parquet_kv_metadata([{listed}]) "
            "WHERE key = 'ARROW:schema'::BLOB ORDER BY file_name"
        )
        for name, arrow_schema in found:
            durations = parquet_files.duration_columns(arrow_schema)
            for column in self._schema.columns:
                if column in durations:
                    raise DataError(
                        f"column {column} has type {durations[column]} in {name}; a number, text, "
                        "date or timestamp is needed. Cast it to a number of a unit of your "
                        "choice, such as seconds"
                    )

    def survey(self) -> int:
        """Number of rows, once no column holds what it may not hold.

        Raises:
            DataError: there are no rows, nulls where none are allowed, or values of a text file
                that its columns' types would cut.
        """
        columns = self._schema.columns
        counts = ", ".join(f"count({_name(column)})" for column in columns)
        revealing = revealing_types(self._asked)
        lost = "".join(
            f", min({_name(c)}) FILTER (WHERE {condition.format(_name(c))})"
            for c, (_, condition) in revealing.items()
        )
        types = self._asked | {column: kind for column, (kind, _) in revealing.items()}
        table = self._scan(self._files.names, types)
        total, *found = self._fetch(f"SELECT count(*), {counts}{lost} FROM {table}")[0]
        present, values = found[: len(columns)], found[len(columns) :]
        if total == 0:
            raise DataError(
                f"the inputs hold no rows: {', '.join(self._files.names)}. Check the path"
            )
        refuse_nulls(self._schema, {c: total - n for c, n in zip(columns, present, strict=True)})
        for column, value in zip(revealing, values, strict=True):
            if value is not None:
                raise DataError(loss_refusal(self._schema, column, value))
        return int(total)

    def distinct(self, column: str) -> list[str]:
        """Sorted distinct values of a column, as text."""
        query = f"SELECT DISTINCT CAST({_name(column)} AS VARCHAR) FROM {self._table} ORDER BY 1"
        return [row[0] for row in self._fetch(query)]

    def arrow_types(self, columns: list[str]) -> dict[str, pa.DataType]:
        """Types of the columns as Arrow sees them."""
        listed = ", ".join(_name(column) for column in columns)
        empty = self._query(f"SELECT {listed} FROM {self._table} LIMIT 0").to_arrow_table()
        return dict(zip(columns, empty.schema.types, strict=True))

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """All rows, in no particular order, in batches that share nothing."""
        if self._arrow_gives_the_same:
            for name in self._files.names:
                with self._refused(name):
                    yield from parquet_files.batches(name, columns, _BATCH_ROWS)
            return
        listed = ", ".join(_name(column) for column in columns)
        reader = self._query(f"SELECT {listed} FROM {self._table}").to_arrow_reader(_BATCH_ROWS)
        with self._refused(""):
            yield from reader

    @cached_property
    def _arrow_gives_the_same(self) -> bool:
        types = self.arrow_types(self._schema.columns)
        names = self._files.names
        return self._files.parquet and all(parquet_files.holds(name, types) for name in names)

    def _run(self, statement: str) -> None:
        self._connection.execute(statement)

    def _query(self, query: str, name: str = "") -> Any:
        """A relation: it keeps no result, so that fetching from it streams."""
        with self._refused(name):
            return self._connection.sql(query)

    def _fetch(self, query: str, name: str = "") -> list[tuple[Any, ...]]:
        relation = self._query(query, name)
        with self._refused(name):
            rows: list[tuple[Any, ...]] = relation.fetchall()
        return rows

    @contextmanager
    def _refused(self, name: str) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, duckdb.Error, OSError) as error:
            what = " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
            where = f"input {name}" if name else "an input"
            if isinstance(error, duckdb.OutOfMemoryException):
                raise DataError(
                    f"{where} cannot be read within the memory allowed: {what.rstrip('.')}. "
                    "Allow more (--memory)"
                ) from error
            remedy = _REMEDY_FOR_PARQUET if self._files.parquet else _REMEDY_FOR_TEXT
            raise DataError(f"{where} cannot be read: {what.rstrip('.')}. {remedy}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
