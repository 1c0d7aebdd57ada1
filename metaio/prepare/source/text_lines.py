"""Reads the lines of CSV and TSV files as they are, on any URL, whatever their bytes."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

import fsspec
import pyarrow as pa

DELIMITERS = ",;\t|"
_SAMPLE_LINES = 20_480  # as many as DuckDB looks at
CODECS = {".gz": "gzip", ".zst": "zstd"}
_BLOCK = 1 << 20  # characters
_LONGEST_LINE = 1 << 26  # of more a line counts as several, so that it fits into memory


@contextmanager
def open_text_lines(
    name: str, encoding: str, newline: str | None = ""
) -> Iterator[io.TextIOWrapper]:
    """Yield a text file of the lines; `newline` is that of open()."""
    with fsspec.open(name, "rb") as file:
        codec = CODECS.get(PurePath(name).suffix.lower())
        plain: Any = pa.CompressedInputStream(pa.PythonFile(file), codec) if codec else file
        # UTF-8 is read as Latin-1, one character a byte: bad bytes in unread columns do no harm.
        # UTF-16 as DuckDB does, even without a byte order mark.
        own = "utf-16-le" if encoding == "utf-16" else "latin-1"
        with io.TextIOWrapper(plain, encoding=own, errors="replace", newline=newline) as lines:
            yield lines


def iterate_lines(file: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1."""
    return enumerate(iter(partial(file.readline, _LONGEST_LINE), ""), start=1)


def count_lines(
    names: Sequence[str], encoding: str, mark: str, block: int = _BLOCK
) -> tuple[int, int, int]:
    """Return the number of lines of files, of blank ones, and of those that begin with `mark`."""
    num_lines = num_blank = num_comments = 0
    for name in names:
        with open_text_lines(name, encoding, newline=None) as file:
            for lines in _iterate_blocks(file, block):
                num_lines += len(lines)
                num_blank += lines.count("")
                num_comments += sum(line.startswith(mark) for line in lines) if mark else 0
    return num_lines, num_blank, num_comments


def _iterate_blocks(file: io.TextIOWrapper, size: int) -> Iterator[list[str]]:
    """Yield all lines, without their ends, many at once."""
    # One by one lines take longer to count.
    rest = ""
    while block := file.read(size):
        *lines, rest = (rest + block).split("\n")
        yield lines
    if rest:
        yield [rest]


def read_header(
    name: str, encoding: str, max_line_bytes: int, wanted: Sequence[str]
) -> tuple[str, list[str]]:
    """Return delimiter and fields of a file's first line; ("", []) if `wanted` ones are missing."""
    try:
        with open_text_lines(name, encoding) as file:
            line = file.readline(max_line_bytes).rstrip("\r\n")
    except (OSError, pa.ArrowException):
        return "", []
    if encoding == "utf-8":
        # Undoes the reading as Latin-1.
        line = line.encode("latin-1").decode(errors="replace")
    for delimiter in DELIMITERS:
        # A byte order mark is no part of the first name.
        fields = split_fields(line.removeprefix("\ufeff"), delimiter)
        if set(wanted) <= set(fields):
            return delimiter, fields
    return "", []


def split_fields(line: str, delimiter: str) -> list[str]:
    """Return the fields of one line."""
    return next(csv.reader([line], delimiter=delimiter), [])


def shows_quotes(name: str, encoding: str) -> bool:
    """Return whether the first lines of a file tell how values are quoted, or cannot be read."""
    try:
        with open_text_lines(name, encoding) as file:
            lines = file.read(_BLOCK).splitlines()[:_SAMPLE_LINES]
    except (OSError, pa.ArrowException):
        return True
    return any(re.search(f"\"|(^|[{DELIMITERS}])'", line) for line in lines)
