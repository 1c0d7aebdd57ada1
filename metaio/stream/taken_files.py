"""Decides which files an increment takes: none twice, none that was rewritten since."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from metaio.errors import DataError
from metaio.format.storage import find_file_system
from metaio.prepare.source.input_files import ArchiveMember

_CHUNK_BYTES = 1 << 22
_NO_BYTES = xxhash.xxh3_128_hexdigest(b"")


class InputFile(NamedTuple):
    """A file by its name and the xxh3_128 of its bytes."""

    name: str
    num_bytes: int
    xxh3: str


@dataclass(frozen=True)
class OfferedFiles:
    """The files of a call, as given (archives and empty ones included) and as read."""

    given: list[InputFile]
    read: list[InputFile]
    # By name, the read files that were unpacked from archives.
    members: dict[str, ArchiveMember]

    @property
    def recorded(self) -> list[InputFile]:
        """Return what an increment lists as inputs: archives, and each file in them."""
        return self.given + [
            file._replace(name=_format_name(file.name, self.members))
            for file in self.read
            if file.name in self.members
        ]


def hash_file(name: str) -> InputFile:
    """Return a file with its hash; reads all of it."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    fs, path = find_file_system(name)
    try:
        with fs.open(path, "rb") as file:
            # In chunks, since a file may be larger than memory.
            while data := file.read(_CHUNK_BYTES):
                digest.update(data)
                num_bytes += len(data)
    except OSError as error:
        raise DataError(f"input {name} cannot be read: {error}. Check the path") from error
    return InputFile(name, num_bytes, digest.hexdigest())


def collect_files(
    given: list[str], members: dict[str, ArchiveMember], read: list[InputFile], empty: list[str]
) -> OfferedFiles:
    """Return the files of a call: `read` hold rows, `empty` held no byte when they were opened."""
    # Not hashed again: such a file may have been written to since, and was not read.
    known = {name: InputFile(name, 0, _NO_BYTES) for name in empty}
    known |= {file.name: file for file in read}
    files = [known.get(name) or hash_file(name) for name in dict.fromkeys(given)]
    return OfferedFiles(files, read, members)


def check_not_taken(files: OfferedFiles, taken_files: pa.Table, may_differ: bool = False) -> None:
    """Raise DataError for a file that was taken under the same name, unless it was empty then, or
    `may_differ` and does."""
    row_of = {name: row for row, name in enumerate(taken_files["name"].to_pylist())}
    for file in files.given:
        row = row_of.get(file.name)
        if row is None:
            continue
        before = taken_files.slice(row, 1).to_pylist()[0]
        if before["xxh3"] == file.xxh3:
            raise DataError(_explain_taken(file.name, before))
        # An empty file gave no rows: what was written to it since is new.
        if before["xxh3"] == _NO_BYTES or may_differ:
            continue
        raise DataError(
            f"input {file.name} was taken into increment {before['increment']} with other content: "
            "it was rewritten since, and increments do not change. Give new rows in a file of a "
            "new name, with --backfill the file as it is, or begin a new stream"
        )


def find_duplicates(
    files: OfferedFiles, taken_files: pa.Table, has_rows: Callable[[str], bool]
) -> dict[InputFile, str]:
    """Return each file (or its archive) whose rows would be trained twice, with the reason."""
    row_of = {xxh3: row for row, xxh3 in enumerate(taken_files["xxh3"].to_pylist())}
    found: dict[InputFile, str] = {}
    first_of: dict[str, InputFile] = {}
    given = {file.name: file for file in files.given}
    for file in files.read:
        row, first = row_of.get(file.xxh3), first_of.setdefault(file.xxh3, file)
        # Files without rows, such as a header alone, are often equal.
        if (row is None and first is file) or not has_rows(file.name):
            continue
        file_name = _format_name(file.name, files.members)
        member = files.members.get(file.name)
        # The caller can leave out an archive, not a file inside of it.
        owner = given[file.name if member is None else member.archive]
        if row is not None:
            found[owner] = _explain_taken(file_name, taken_files.slice(row, 1).to_pylist()[0])
        else:
            found[owner] = (
                f"input {file_name} holds the same bytes as "
                f"{_format_name(first.name, files.members)}: its "
                "rows would be trained twice. Leave one out"
            )
    return found


def append_inputs(taken_files: pa.Table, files: list[InputFile], increment: int) -> pa.Table:
    """Return the files taken so far, with those of an increment."""
    columns: dict[str, list[Any]] = {
        "name": [file.name for file in files],
        "xxh3": [file.xxh3 for file in files],
        "increment": [increment] * len(files),
    }
    new_files = pa.table(columns, schema=taken_files.schema)
    return pa.concat_tables([taken_files, new_files]).combine_chunks()


def _explain_taken(name: str, before: dict[str, Any]) -> str:
    return (
        f"input {name} was taken into increment {before['increment']} already, as "
        f"{before['name']}: its rows would be trained twice. Leave it out"
    )


def _format_name(name: str, members: dict[str, ArchiveMember]) -> str:
    member = members.get(name)
    return name if member is None else f"{member.archive}/{member.path}"
