"""Says in one line what DuckDB finds wrong with a line of text: its own words are a page long, and
advise settings of DuckDB.
"""

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import fsspec
import pyarrow as pa

from metaio.errors import DataError, shown

DELIMITERS = ",;\t|"
_ENCODING = (
    'Say how the file is written under [text] in the schema, such as encoding = "latin-1", or '
    "convert it to UTF-8"
)
_NOT_LATIN = (
    "an input holds the bytes 80 to 9f, which are no letters of Latin-1; Windows' cp1252 has "
    "quotes there. Convert it: iconv -f cp1252 -t utf-8"
)
_FIT = "Correct that row, or declare the column's type in the schema"
# What DuckDB says, the same in one line, and what to do.
_FAULTS = (
    (
        r"Expected Number of Columns: (\d+) Found: (\d+)",
        "it has {1} fields, the header has {0}",
        "Correct that row; a line that is no row needs comment under [text] in the schema",
    ),
    (
        r"Maximum line size of (\d+) bytes exceeded",
        "it has more than {0} bytes",
        "Close a quote that is open, or raise max_line_bytes under [text] in the schema",
    ),
    (r"unterminated quote", "a quote is not closed", "Correct that row"),
    (
        r"Error when converting column \"(.*)\"\. Could not convert string (\".*\") to '(.*)'",
        "column {0} holds {1}, which is no {2}",
        f"{_FIT}, or, if it means a null, list it in null under [text]",
    ),
)


def fault_of(message: str, header_of: Callable[[str], tuple[str, list[str]]]) -> str | None:
    """Return which line of which file is wrong, how, and what to do, given DuckDB's words; None
    where they tell of no line. `header_of` returns a file's delimiter and columns.
    """
    json = re.search(r"Malformed JSON in file \"(.*?)\", at byte \d+ in line (\d+)", message)
    if json:
        # DuckDB counts the lines from 2.
        return f"input {json[1]}, line {int(json[2]) - 1}: it is no JSON. Correct it"
    # Without the advice behind it, which is for users of DuckDB. In lists it counts otherwise.
    json = re.search(
        r"transform error in file \"(.*?)\", in line (\d+): (.*?)( Try |\n|$)", message
    )
    if json:
        return f"input {json[1]}, near line {json[2]}: {shortened(json[3])}. {_FIT}"
    date = re.search(r"parse string (\".*\") according to format specifier (\".*\")", message)
    if date:
        return f"[time] holds {date[1]}, which is not of its format {date[2]}. Correct one of them"
    if "not latin-1 encoded" in message:
        return _NOT_LATIN
    line = re.search(r"CSV Error on Line: (\d+)", message)
    if line is None:
        return None
    # From behind: the line itself is quoted before, and may hold anything.
    file = re.findall(r"^  file = (.*)$", message, re.MULTILINE)[-1]
    if "Invalid unicode" in message:
        number, column = bad_bytes(file, *header_of(file))
        what = f"column {column}" if column else "it"
        return f"input {file}, line {number}: {what} is not UTF-8. {_ENCODING}"
    text, remedy = shortened(message.partition("\n")[2]), _FIT
    for pattern, fault, known_remedy in _FAULTS:
        found = re.search(pattern, message)
        if found:
            text, remedy = shortened(fault.format(*found.groups())), known_remedy
            break
    return f"input {file}, line {line[1]}: {text}. {remedy}"


def check_objects(name: str, columns: Sequence[str]) -> None:
    """Raise DataError for a file whose lines are JSON, but no rows."""
    if list(columns) == ["json"]:  # so DuckDB calls it
        raise DataError(
            f"input {name} has no JSON object in each line: it is one array, or holds values. "
            "Write a row in each line, as jq -c '.[]' does"
        )


def shortened(text: str) -> str:
    """Return the first lines of `text` as one, with an end."""
    lines = (line.strip() for line in text.splitlines()[:3])
    return shown(" ".join(line for line in lines if line).rstrip("."), 300)


def fields_of(line: str, delimiter: str) -> list[str]:
    """Return the fields of one line."""
    return next(csv.reader([line], delimiter=delimiter), [])


_SAMPLE_LINES = 20_480  # as many as DuckDB looks at
_CODECS = {".gz": "gzip", ".zst": "zstd"}


@contextmanager
def text_lines(name: str, encoding: str) -> Iterator[io.TextIOWrapper]:
    """Return a text file that yields its lines with their ends: of UTF-8 one character for each
    byte, so that bytes that are none, in columns that nobody reads, do no harm.
    """
    with fsspec.open(name, "rb") as file:
        codec = _CODECS.get(PurePath(name).suffix.lower())
        plain: Any = pa.CompressedInputStream(pa.PythonFile(file), codec) if codec else file
        own = "utf-16" if encoding == "utf-16" else "latin-1"
        with io.TextIOWrapper(plain, encoding=own, errors="replace", newline="") as lines:
            yield lines


def counted_lines(names: Sequence[str], encoding: str, mark: str) -> tuple[int, int, int]:
    """Return how many lines files have, and how many of them are blank, or begin with a mark."""
    num_lines = num_blank = num_comments = 0
    for name in names:
        with text_lines(name, encoding) as lines:
            for line in lines:
                num_lines += 1
                num_blank += not line.strip("\r\n")
                num_comments += bool(mark) and line.startswith(mark)
    return num_lines, num_blank, num_comments


def write_sample(name: str, sample: Path) -> None:
    """Write the first lines of a file in UTF-8, with a mark for each byte that is none."""
    with text_lines(name, "utf-8") as lines, sample.open("wb") as file:
        for line in itertools.islice(lines, _SAMPLE_LINES):
            file.write(line.encode("latin-1").decode(errors="replace").encode())


def bad_bytes(name: str, delimiter: str, header: Sequence[str]) -> tuple[int, str]:
    """Return the first line of a file that is not UTF-8, and its column; "" where that is not
    known.
    """
    with text_lines(name, "utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            own = line.encode("latin-1")
            try:
                own.decode()
            except UnicodeDecodeError:
                # Each byte that is no text becomes a surrogate, which UTF-8 cannot hold.
                text = own.decode(errors="surrogateescape")
                fields = zip(header, fields_of(text, delimiter), strict=False) if header else ()
                return number, next((column for column, value in fields if _is_bad(value)), "")
    return 0, ""


def _is_bad(text: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in text)
