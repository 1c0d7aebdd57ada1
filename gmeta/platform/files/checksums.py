"""Sizes and checksums of files, and the files that differ from them."""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from metaio.format.names import is_path_below
from metaio.format.typed_json import parse_typed


@dataclass(frozen=True)
class FileChecksum:
    """Size and checksum (xxh3_64) of one file."""

    num_bytes: int
    xxh3: str


def parse_entries(listed: Any) -> dict[str, FileChecksum]:
    """Return the checksums of a folder's files by name, from listed JSON. Raise ValueError."""
    entries: dict[str, FileChecksum] = parse_typed(dict[str, FileChecksum], listed, "files")
    for name in entries:
        if not is_path_below(name):
            raise ValueError(f"it lists {name!r:.80}, which is no file below its folder")
    return entries


def describe_file(path: Path) -> FileChecksum:
    """Return the size and checksum of a file; reads all of it, at several GB/s from memory."""
    digest = xxhash.xxh3_64()
    num_bytes = path.stat().st_size
    # Mapped: a table may be larger than memory, and beside training other threads go on.
    with path.open("rb") as file:
        if num_bytes:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                digest.update(mapped)
    return FileChecksum(num_bytes, digest.hexdigest())


def find_differences(
    folder: Path, files: Mapping[str, FileChecksum], listed_in: str, *, contents: bool
) -> Iterator[str]:
    """Yield one line for each file of `folder` that differs from `files`."""
    for name, entry in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            yield f"{path} does not exist, {listed_in} lists it"
        elif (num_bytes := path.stat().st_size) != entry.num_bytes:
            yield (
                f"{path} has {num_bytes:,} bytes, {listed_in} says {entry.num_bytes:,}: it was cut "
                "short or rewritten"
            )
        # Without `contents` no file is read: only existence and size are compared.
        elif contents and describe_file(path) != entry:
            yield f"{path} differs from the checksum in {listed_in}: it was altered"
