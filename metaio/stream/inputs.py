"""Which files an increment takes: no file twice, none that was rewritten since it was taken."""

from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from metaio.errors import DataError
from metaio.format.storage import file_system

_CHUNK_BYTES = 1 << 22


class InputFile(NamedTuple):
    """A file by its name and the xxh3_128 of its bytes."""

    name: str
    num_bytes: int
    xxh3: str


def described(name: str) -> InputFile:
    """Return a file with its hash; reads all of it.

    Raises:
        DataError: it cannot be read.
    """
    digest, num_bytes = xxhash.xxh3_128(), 0
    fs, path = file_system(name)
    try:
        with fs.open(path, "rb") as file:
            while data := file.read(_CHUNK_BYTES):
                digest.update(data)
                num_bytes += len(data)
    except OSError as error:
        raise DataError(f"input {name} cannot be read: {error}. Check the path") from error
    return InputFile(name, num_bytes, digest.hexdigest())


def refuse_doubled(files: list[InputFile]) -> None:
    """Raise DataError for two files of the same bytes."""
    found: dict[str, InputFile] = {}
    for file in files:
        if file.num_bytes and file.xxh3 in found:
            raise DataError(
                f"input {file.name} holds the same bytes as {found[file.xxh3].name}: its rows "
                "would be trained twice. Leave one out"
            )
        found[file.xxh3] = file


def refuse_known(files: list[InputFile], taken: pa.Table) -> None:
    """Raise DataError for a file that an increment has taken, by its content or by its name."""
    hashes = {xxh3: row for row, xxh3 in enumerate(taken["xxh3"].to_pylist())}
    names = {name: row for row, name in enumerate(taken["name"].to_pylist())}
    for file in files:
        row = hashes.get(file.xxh3)
        if row is not None:
            before = taken.slice(row, 1).to_pylist()[0]
            raise DataError(
                f"input {file.name} was taken into increment {before['increment']} already, as "
                f"{before['name']}: its rows would be trained twice. Leave it out"
            )
        row = names.get(file.name)
        if row is not None:
            number = taken["increment"][row].as_py()
            raise DataError(
                f"input {file.name} was taken into increment {number} with other content: it was "
                "rewritten since, and increments do not change. Give new rows in a file of a new "
                "name, or begin a new stream"
            )


def with_inputs(taken: pa.Table, files: list[InputFile], increment: int) -> pa.Table:
    """Return the files taken so far, with those of an increment."""
    columns: dict[str, list[Any]] = {
        "name": [file.name for file in files],
        "xxh3": [file.xxh3 for file in files],
        "increment": [increment] * len(files),
    }
    return pa.concat_tables([taken, pa.table(columns, schema=taken.schema)]).combine_chunks()
