"""Reads text files of fields, one record a line, as public data sets are distributed."""

from pathlib import Path

from metaio.errors import DataError


def read_fields(path: Path, separator: str, num_fields: int, source: str) -> list[list[str]]:
    """Return the fields of each line that is not blank; files are UTF-8 or Latin-1."""
    if not path.is_file():
        raise DataError(f"{path} does not exist. Point PATH at the unpacked {source} folder")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    found = []
    # Not splitlines(), which also splits at U+0085, a byte that Latin-1 files may hold.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        fields = line.split(separator)
        if line and len(fields) != num_fields:
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields, {num_fields} separated by "
                f"{separator!r} are expected. Download the file again"
            )
        if line:
            found.append(fields)
    if not found:
        raise DataError(f"{path} is empty. Download {source} again")
    return found


def parse_integer(text: str, path: Path, what: str) -> int:
    """Return a field as an integer; decimals of 0 are allowed, as some copies write `5.0`."""
    # isdigit() alone accepts digits such as ², which int() refuses.
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        # int() of it raises ValueError for NaN, OverflowError for infinity.
        value = float(text)
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{path} holds {what} {text!r}; a whole number is needed. Correct that line"
        ) from error
    return int(value)
