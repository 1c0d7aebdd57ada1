"""Rewrites the messages of DuckDB and pyarrow about input files in one line."""

import re
from collections.abc import Sequence

import duckdb
import fsspec

from metaio.errors import AccessError, DataError, to_one_line
from metaio.prepare.source.input_files import FileKind
from metaio.prepare.source.text_lines import iterate_lines, open_text_lines

_ENCODING = (
    'Say how the file is written under [text] in the schema, such as encoding = "latin-1", or '
    "convert it to UTF-8"
)
_NOT_LATIN = (
    "an input holds the bytes 80 to 9f, which are no letters of Latin-1; Windows' cp1252 has "
    "quotes there. Convert it: iconv -f cp1252 -t utf-8"
)
_FIT = "Correct that row, or declare the column's type in the schema"
# A pattern of DuckDB's message, the same in one line, and what to do: its own messages are a page
# long and advise settings of DuckDB.
_CSV_ERRORS = (
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


_UNPACK, _EXPORT = "Unpack it, or pack it by gzip", "Export it as CSV or Parquet"
# What a file is that begins with these bytes, how it would be named, and what to do.
_FIRST_BYTES: dict[bytes, tuple[str, str | tuple[str, ...], str]] = {
    b"BZh": ("packed by bzip2", "", _UNPACK),
    b"\xfd7zXZ": ("packed by xz", "", _UNPACK),
    b"\x1f\x8b": ("packed by gzip", ".gz", "Let its name end with .gz"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", ".zst", "Let its name end with .zst"),
    b"PK\x03\x04": ("a zip archive or a workbook", ".zip", _EXPORT),
    b"PAR1": ("Parquet", (".parquet", ".pq"), "Let its name end with .parquet"),
    b"PARE": ("encrypted Parquet", "", "Write it without encryption"),
    b"ORC": ("an ORC file", "", _EXPORT),
    b"Obj\x01": ("an Avro file", "", _EXPORT),
}


# What zlib and zstd say of a file that they cannot unpack.
_OF_PACKED_FILES = re.compile(
    "gzip|zstd|frame|checksum|corrupt|dictionary|src size|literals", re.IGNORECASE
)


def make_read_error(error: Exception, name: str, kind: FileKind) -> DataError:
    """Return the DataError that says in one line what DuckDB or pyarrow complained of."""
    what, problem = str(error), f"{f'input {name}' if name else 'an input'} cannot be read"
    if fault := explain_first_bytes(name):
        return DataError(fault)
    if isinstance(error, duckdb.OutOfMemoryException):
        return AccessError(
            f"{problem} within the memory allowed: {shorten(what)}. Allow more (--memory)"
        )
    problem += f": {shorten(what)}. "
    is_io = isinstance(error, duckdb.IOException)
    if is_io and _OF_PACKED_FILES.search(what):
        return DataError(f"{problem}It is cut short, damaged or misnamed: write it again")
    # Disk or network, not the data: the caller may try again.
    if is_io or getattr(error, "errno", None):
        return AccessError(f"{problem}Look after the disk or the network, then try again")
    if kind == "Parquet":
        return DataError(f"{problem}Write that file again")
    return DataError(explain_csv_error(what) or f"{problem}{_FIT}")


def explain_first_bytes(name: str) -> str | None:
    """Return one line on a file whose first bytes say what it is, unlike its name; None if none."""
    try:
        with fsspec.open(name, "rb") as file:
            begin = file.read(8)
    except (OSError, ValueError):
        return None
    for mark, (what, suffix, remedy) in _FIRST_BYTES.items():
        if begin.startswith(mark) and not (suffix and name.lower().endswith(suffix)):
            return (
                f"input {name} is {what} by its first bytes: CSV, JSON lines and Parquet are read, "
                f"packed by gzip, zstd or zip if the name says so. {remedy}"
            )
    return None


def explain_csv_error(message: str) -> str | None:
    """Return one line on the row that DuckDB's `message` complains of; None if it names none."""
    json = re.search(r"Malformed JSON in file \"(.*?)\", at byte \d+ in line (\d+)", message)
    if json:
        # DuckDB counts these lines from 2.
        return f"input {json[1]}, line {int(json[2]) - 1}: it is no JSON. Correct it"
    # Cut before the advice, which is for users of DuckDB. In lists it counts lines otherwise.
    json = re.search(
        r"transform error in file \"(.*?)\", in line (\d+): (.*?)( Try |\n|$)", message
    )
    if json:
        return f"input {json[1]}, near line {json[2]}: {shorten(json[3])}. {_FIT}"
    date = re.search(r"parse string (\".*\") according to format specifier (\".*\")", message)
    if date:
        return f"[time] holds {date[1]}, which is not of its format {date[2]}. Correct one of them"
    if "not latin-1 encoded" in message:
        return _NOT_LATIN
    unknown = re.search(r"Error when sniffing file \"(.*)\"", message)
    mixed = unknown or re.search(r"invalid state\.(?s:.*)\n  file = (.*)", message)
    if mixed and (fault := _explain_line_ends(mixed[1])):
        return fault
    if unknown:
        return f"input {unknown[1]} is no CSV in UTF-8: its lines have no columns. {_ENCODING}"
    line = re.search(r"CSV Error on Line: (\d+)", message)
    if line is None:
        return None
    # The last match: the quoted line before it may hold anything, even such a line.
    file = re.findall(r"^  file = (.*)$", message, re.MULTILINE)[-1]
    fault, remedy = explain_fault(message)
    number = _find_long_line(file, message) or line[1]
    return f"input {file}, line {number}: {fault}. {remedy}"


def _find_long_line(name: str, message: str) -> int:
    """Return the number of the line of which DuckDB says that it is too long, 0 for others."""
    limit = re.search(r"Maximum line size of (\d+) bytes", message)
    if limit is None:
        return 0
    # Among the first lines DuckDB counts none.
    with open_text_lines(name, "utf-8") as lines:
        return next((n for n, line in iterate_lines(lines) if len(line) > int(limit[1])), 0)


def explain_fault(message: str, column: str | None = None) -> tuple[str, str]:
    """Return what DuckDB's message says of a line of a text file, and what to do."""
    if "Invalid unicode" in message:
        return f"{f'column {column}' if column else 'it'} is not UTF-8", _ENCODING
    for pattern, fault, remedy in _CSV_ERRORS:
        found = re.search(pattern, message)
        if found:
            # Some of our own types are wider than those that a column gets.
            return shorten(fault.format(*found.groups())).replace("HUGEINT", "BIGINT"), remedy
    # Its first line only names the place, if it does.
    head, _, rest = message.partition("\n")
    return shorten(rest if "CSV Error on Line" in head else message), _FIT


def _explain_line_ends(name: str) -> str | None:
    """Return one line on the first line that ends unlike the first one; None if none does."""
    with open_text_lines(name, "utf-8") as lines:
        first = ""
        for number, line in iterate_lines(lines):
            end = line[len(line.rstrip("\r\n")) :]
            first = first or end
            if end not in ("", first):
                named = (one.replace("\r", "CR").replace("\n", "LF") for one in (end, first))
                what = "it ends with {}, line 1 with {}".format(*named)
                return f"input {name}, line {number}: {what}. End all lines alike, as dos2unix does"
    return None


def check_json_objects(name: str, columns: Sequence[str]) -> None:
    """Raise DataError for a file whose lines are JSON, but not objects."""
    if list(columns) == ["json"]:  # DuckDB's name for it
        raise DataError(
            f"input {name} has no JSON object in each line: it is one array, or holds values. "
            "Write a row in each line, as jq -c '.[]' does"
        )


def shorten(text: str) -> str:
    """Return the first three lines of `text` as one, with an end."""
    lines = (line.strip() for line in text.splitlines()[:3])
    return to_one_line(" ".join(line for line in lines if line).rstrip("."), 300)
