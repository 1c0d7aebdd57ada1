"""Lines of text files that cannot be read: all of them at once, and copies without them."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import duckdb

from metaio.errors import DataError
from metaio.prepare.schema.schema import TextRule
from metaio.prepare.source.csv_errors import explain_fault
from metaio.prepare.source.text_lines import CODECS, iterate_lines, open_text_lines
from metaio.quantities import format_count

_SHOWN_LINES = 20
_MAX_BAD_LINES = 1_000
_MOST_LISTED = 100_000  # DuckDB holds them in memory
LENIENT = f", store_rejects = true, rejects_limit = {_MOST_LISTED}"
_SKIP = (
    'Correct them, or have them left out and counted: bad_lines = "skip" under [text] in the schema'
)
# An open quote may have swallowed good lines, so the first one alone is bad.
_QUERY = r"""
    SELECT line_byte_position, error_message, column_name, CASE
        WHEN error_type IN ('UNQUOTED VALUE', 'LINE SIZE OVER MAXIMUM') THEN 1
        ELSE 1 + len(regexp_extract_all(trim(csv_line, chr(10) || chr(13)), '\r\n|\n|\r')) END
    FROM reject_errors QUALIFY 1 = row_number() OVER (
        PARTITION BY line_byte_position ORDER BY error_type = 'CAST', column_idx)
    ORDER BY 1
"""


class BadRow(NamedTuple):
    """Where a row begins that cannot be read, in bytes of UTF-8; why; and how many lines it has."""

    place: int
    message: str  # DuckDB's
    column: str | None
    num_lines: int


class BadLine(NamedTuple):
    """A line of a row that cannot be read."""

    input: str
    line: int
    reason: str
    text: str
    remedy: str


def find_bad_rows(connection: duckdb.DuckDBPyConnection, query: str) -> list[BadRow]:
    """Return the rows of one file that a `query` with a LENIENT scan could not read."""
    connection.execute(query).fetchall()
    found = [BadRow(*row) for row in connection.execute(_QUERY).fetchall()]
    connection.execute("DROP TABLE reject_errors; DROP TABLE reject_scans")
    return found


def show_bad_lines(name: str, encoding: str, rows: Sequence[BadRow], given: str) -> list[BadLine]:
    """Return the first lines of rows of the file `name`, which came from the file `given`."""
    found = _iterate_lines(name, encoding, rows, given)
    return list(islice((bad for _, bad in found if bad), min(len(rows), _SHOWN_LINES)))


def replace_by_copies(
    names: list[str],
    rule: TextRule,
    folder: str,
    find_rows: Callable[[Iterable[int]], dict[int, list[BadRow]]],
    describe: Callable[[str], str],
) -> list[BadLine]:
    """Replace files in `names` by copies below `folder` without the lines that cannot be read;
    return these."""
    given, bad_lines = [*names], list[BadLine]()
    places: Iterable[int] = range(len(names))
    limit = _MAX_BAD_LINES if rule.max_bad_lines is None else rule.max_bad_lines
    while found := find_rows(places):
        before = len(bad_lines)
        for place, rows in found.items():
            name = given[place]
            # The same path, since names of files and folders may say something of their rows; apart
            # from the others, since a.csv and a.csv.gz would become one.
            copy = Path(folder, f"{before}-{place}", name.rpartition("://")[2].lstrip("/"))
            copy = copy.with_suffix("") if copy.suffix.lower() in CODECS else copy
            copy.parent.mkdir(parents=True)
            bad_lines += _copy_good_lines(names[place], rule.encoding, rows, describe(name), copy)
            if names[place] != name:  # a copy of before
                Path(names[place]).unlink()
            names[place] = str(copy)
        places = found
        if len(bad_lines) > limit or len(bad_lines) == before:
            remedy = f"max_bad_lines under [text] is {limit:,}. Correct them, or raise it"
            raise make_bad_lines_error(len(bad_lines), bad_lines, remedy)
    return bad_lines


def _copy_good_lines(
    name: str, encoding: str, rows: Sequence[BadRow], given: str, copy: Path
) -> list[BadLine]:
    """Write a file without the lines of `rows` to `copy`; return these."""
    found = []
    with copy.open("wb") as file:
        for line, bad in _iterate_lines(name, encoding, rows, given):
            # An end of line stays in its place: the others keep their numbers.
            kept = (line[len(line.rstrip("\r\n")) :] or "\n") if bad else line
            file.write(kept.encode("utf-16-le" if encoding == "utf-16" else "latin-1"))
            found += [bad] if bad else []
    return found


def _iterate_lines(
    name: str, encoding: str, rows: Sequence[BadRow], given: str
) -> Iterator[tuple[str, BadLine | None]]:
    """Yield each line of a file, beside what is wrong with it."""
    waiting, end, last, why = [*reversed(rows)], 0, 0, ("", "")
    with open_text_lines(name, encoding) as lines:
        for number, line in iterate_lines(lines):
            end += len(line if encoding == "utf-8" else line.encode())
            text, bad = line.rstrip("\r\n"), None
            # After blank lines DuckDB gives the place of the first of these.
            if waiting and waiting[-1].place < end and text:
                row = waiting.pop()
                last, why = number + row.num_lines - 1, explain_fault(row.message, row.column)
            if number <= last:
                if encoding == "utf-8":  # was read as Latin-1
                    text = text.encode("latin-1").decode(errors="replace")
                bad = BadLine(given, number, why[0], text, why[1])
            yield line, bad


def make_bad_lines_error(count: int, shown: Sequence[BadLine], remedy: str = "") -> DataError:
    """Return the error that lists lines, by their files."""
    text, name = "", ""
    for bad in shown[:_SHOWN_LINES]:
        place = "" if bad.input == name else f"input {bad.input}, "
        text, name = f"{text}; {place}line {bad.line}: {bad.reason}", bad.input
    if count == 1 and not remedy:
        return DataError(f"{text[2:]}. {shown[0].remedy}")
    more = " or more" if count >= _MOST_LISTED else ""
    first = f", the first {_SHOWN_LINES}" if count > _SHOWN_LINES else ""
    lines = format_count(count, "line")
    return DataError(f"{lines}{more} cannot be read{first}: {text[2:]}. {remedy or _SKIP}")


def write_bad_lines(folder: Path, bad: Sequence[BadLine]) -> None:
    """Write lines that were left out beside a dataset, if there are any."""
    if bad:
        rows = (dict(zip(BadLine._fields[:4], line[:4], strict=True)) for line in bad)
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / "bad_lines.jsonl").write_text(text)
