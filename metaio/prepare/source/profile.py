"""Profiles a log's first rows, column by column, and counts the rows of its tasks."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import duckdb
import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError, to_one_line
from metaio.format.atomic_folder import open_temporary_folder
from metaio.prepare.schema.schema import TextRule
from metaio.prepare.schema.schema_file import check_separator
from metaio.prepare.source.bad_lines import (
    LENIENT,
    find_bad_rows,
    make_bad_lines_error,
    show_bad_lines,
)
from metaio.prepare.source.column_names import check_names
from metaio.prepare.source.csv_errors import (
    check_json_objects,
    explain_csv_error,
    explain_first_bytes,
    shorten,
)
from metaio.prepare.source.input_files import InputFiles, expand_inputs
from metaio.prepare.source.sql import connect, format_scan, format_text_options, quote_column

SAMPLE_ROWS = 1_000_000
MIN_SEPARATED_IDS = 0.3  # of the rows of a text column hold a separator: a list
# Separators of lists, and the most distinct parts there may be for each distinct text: titles,
# which are no lists, have more.
SEPARATORS = {"|": 1.0, ";": 1.0, ",": 0.5, " ": 0.5}
# Formats of times that DuckDB does not see. Day first: a 13th or later rules out the other order.
TIME_FORMATS = tuple(
    f"{day}{hour}"
    for day in (
        *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d"),
        *("%m %d, %Y", "%b %d, %Y", "%d %b %Y"),
    )
    for hour in ("", " %H:%M", " %H:%M:%S")
)
NUM_TIMES_TRIED = 200
# Words that logs write for a null. Hive's \\N is one in any column, the others may be names.
NULL_WORDS = ("\\N", "NULL", "null", "NA", "N/A", "n/a", "None")
_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_UTF_16 = b"\xff\xfe"  # how such a file begins


@dataclass(frozen=True)
class ColumnProfile:
    """What the first rows of a column look like."""

    name: str
    type: pa.DataType
    num_null: int
    num_distinct: int
    least: Any
    most: Any
    separator: str  # "" where its values are no lists in a text
    width: int = 0  # of lists that are all as long; 0 where they are not
    time_format: str = ""  # of text that says times, where its type does not tell

    @property
    def is_list(self) -> bool:
        """Return whether a value holds several."""
        return bool(self.separator) or is_list(self.type)

    @property
    def is_number(self) -> bool:
        """Return whether values are numbers or truth values."""
        types = pa.types
        kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
        return any(bool(is_kind(self.type)) for is_kind in kinds)

    @property
    def is_integer(self) -> bool:
        """Return whether values are whole numbers."""
        return bool(pa.types.is_integer(self.type))

    @property
    def is_time(self) -> bool:
        """Return whether values are dates or times by their type."""
        return bool(pa.types.is_temporal(self.type))

    @property
    def can_be_time(self) -> bool:
        """Return whether values can be times: dates and times, texts of them, or numbers."""
        counts = self.is_number and not pa.types.is_boolean(self.type)
        return counts or self.is_time or bool(self.time_format)


@dataclass(frozen=True)
class LogSample:
    """The first rows of a log; all of them, if `is_whole`."""

    rows: pa.Table
    is_whole: bool = True
    urls: tuple[str, ...] = ()
    text: TextRule = TextRule()  # noqa: RUF009 - frozen

    def task_sizes(self, column: str) -> npt.NDArray[np.int64]:
        """Return how many rows each value of a column has in the complete log, ascending."""
        if self.is_whole:
            counts = pc.value_counts(self.rows[column].combine_chunks())
            return np.sort(counts.field("counts").to_numpy())
        # Counted in the log, since a sample has but some rows of a task.
        name = quote_column(column)
        with _open_log(self.urls) as (connection, files), _translate_errors(files):
            read = format_scan(files, files.names, format_text_options(self.text))
            found = connection.sql(f"SELECT count(*) AS n FROM {read} GROUP BY {name}").fetchnumpy()
        return np.sort(np.asarray(found["n"], np.int64))


def read_log_sample(urls: Sequence[str], separator: str | None = None) -> LogSample:
    """Return the first rows of a log: files, globs or folders of CSV, JSON lines or Parquet."""
    with _open_log(urls) as (connection, files), _translate_errors(files):
        # DuckDB reads UTF-16 only where its options say so.
        with fsspec.open(files.names[0], "rb", compression="infer") as file:
            encoding: Literal["utf-8", "utf-16"] = "utf-16" if file.read(2) == _UTF_16 else "utf-8"
            text = TextRule(encoding, separator=separator)
            check_separator(text)
        try:
            found = _fetch_rows(connection, files, text)
        except duckdb.InvalidInputException as error:
            if "Invalid unicode" not in str(error) or files.kind != "text":
                raise
            # Latin-1 decodes any bytes, so it is the last guess.
            text = replace(text, encoding="latin-1")
            found = _fetch_rows(connection, files, text)
        _check_columns(connection, files, found.column_names, text)
        text = replace(text, null=_find_null_words(found) if files.kind == "text" else ())
        if text.null:  # of numbers with such words DuckDB makes text
            found = _fetch_rows(connection, files, text)
    if not found.num_rows:
        raise DataError(f"input {files.names[0]} has 0 rows. Give a log with some")
    rows = found.slice(0, SAMPLE_ROWS)
    return LogSample(rows, found.num_rows == rows.num_rows, tuple(urls), text)


def _fetch_rows(
    connection: duckdb.DuckDBPyConnection, files: InputFiles, text: TextRule
) -> pa.Table:
    read = format_scan(files, files.names, format_text_options(text))
    # One row more than the sample, to see whether the log ends there.
    return connection.sql(f"FROM {read} LIMIT {SAMPLE_ROWS + 1}").to_arrow_table()


def _find_null_words(rows: pa.Table) -> tuple[str, ...]:
    """Return which of NULL_WORDS stand for nulls: \\N anywhere, the others among numbers."""
    found = set()
    for values in rows.columns:
        if pa.types.is_string(values.type):
            distinct = pc.unique(values).drop_null()
            is_word = pc.is_in(distinct, pa.array(NULL_WORDS))
            words = distinct.filter(is_word).to_pylist()
            others = distinct.filter(pc.invert(is_word))
            # One such word among numbers makes DuckDB read the column as text.
            is_numbers = len(others) and pc.all(pc.match_substring_regex(others, _NUMBER)).as_py()
            found |= {word for word in words if is_numbers or word == NULL_WORDS[0]}
    return tuple(word for word in NULL_WORDS if word in found)


def _check_columns(
    connection: duckdb.DuckDBPyConnection, files: InputFiles, names: list[str], text: TextRule
) -> None:
    """Raise DataError for a file of which each line was read as one value."""
    if files.kind == "JSON":
        check_json_objects(files.names[0], names)
    options = format_text_options(text)
    check_names(connection, files, files.names[0], options, names, names)
    if files.kind == "text" and len(names) == 1:
        name, table = files.names[0], format_scan(files, files.names[:1], options + LENIENT)
        if rows := find_bad_rows(connection, f"SELECT count(COLUMNS(*)) FROM {table}"):
            raise make_bad_lines_error(len(rows), show_bad_lines(name, text.encoding, rows, name))
        raise DataError(
            f"input {name} has one column, {to_one_line(names[0], 300)}; task, label and an input "
            r"are needed. Say what separates the values, such as --separator '\x01'"
        )


@contextmanager
def _open_log(urls: Sequence[str]) -> Iterator[tuple[duckdb.DuckDBPyConnection, InputFiles]]:
    with open_temporary_folder() as folder:
        files = expand_inputs(list(urls), Path(folder))
        with connect(files, folder) as connection:
            yield connection, files


@contextmanager
def _translate_errors(files: InputFiles) -> Iterator[None]:
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        fault = explain_first_bytes(files.names[0]) or explain_csv_error(str(error))
        problem = f"input {files.names[0]} cannot be read: {shorten(str(error))}."
        remedy = "Write a schema by hand (docs/format.md)"
        if isinstance(error, PermissionError):
            remedy = "Check its permissions"
        elif files.kind == "Parquet":
            remedy = "Write that file again"
        raise DataError(fault or f"{problem} {remedy}") from error


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))


def profile_column(name: str, values: pa.ChunkedArray) -> ColumnProfile:
    """Return what a column looks like."""
    kind = values.type
    separator = _find_separator(values) if pa.types.is_string(kind) else ""
    split = pc.split_pattern(values, separator) if separator else values
    flat = pc.list_flatten(split) if is_list(split.type) else split
    lengths = pc.unique(pc.list_value_length(values).drop_null()) if is_list(kind) else []
    comparable = not (pa.types.is_nested(flat.type) or pa.types.is_null(flat.type))
    # Python's decimals cannot be compared with floats.
    ordered = flat.cast(pa.float64()) if pa.types.is_decimal(flat.type) else flat
    span = pc.min_max(ordered).as_py() if comparable else {"min": None, "max": None}
    num_distinct = pc.count_distinct(flat).as_py() if comparable else 0
    width = lengths[0].as_py() if len(lengths) == 1 else 0
    form = _find_time_format(values) if pa.types.is_string(kind) else ""
    span = span["min"], span["max"]
    return ColumnProfile(name, kind, values.null_count, num_distinct, *span, separator, width, form)


def _find_separator(values: pa.ChunkedArray) -> str:
    """Return what splits a text column's values, if they are lists; "" if not."""
    for mark, most_parts in SEPARATORS.items():
        holding = pc.sum(pc.match_substring(values, mark)).as_py() or 0
        if holding < MIN_SEPARATED_IDS * len(values):
            continue
        # In lists the same short parts recur in other combinations.
        parts = pc.list_flatten(pc.split_pattern(values.drop_null(), mark))
        if pc.count_distinct(parts).as_py() < most_parts * pc.count_distinct(values).as_py():
            return mark
    return ""


def _find_time_format(values: pa.ChunkedArray) -> str:
    """Return the format in which texts say times; "" if none is known."""
    distinct = pc.unique(values).drop_null()
    # Sampled all over the column: the first texts may all be of one day.
    tried = distinct[:: max(1, len(distinct) // NUM_TIMES_TRIED)].to_pylist()
    if not tried or not re.search(r"\d", tried[0]):
        return ""
    for form in TIME_FORMATS:
        try:
            for text in tried:
                datetime.strptime(text, form)
        except ValueError:
            continue
        return form
    return ""
