"""Finds the input files of prepare: files, globs, folders and zip archives, on any URL."""

import errno
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec

from metaio.errors import AccessError, DataError, TooFewRowsError
from metaio.format.storage import find_file_system, is_local

# An archive that unpacks to more bytes than this, and than so many times its size, is refused.
_LEAST_BOMB, _MOST_PACKED = 256 << 20, 250
_HIDDEN = ("_", ".")
_FOR_PEOPLE = re.compile(
    r"(read_?me|licen[cs]e|copying|changelog)(\.\w+)?|(notice|citation)(\.(txt|cff|bib))?"
    r"|.+\.(md|rst|pdf|html?)",
    re.IGNORECASE,
)

FileKind = Literal["Parquet", "text", "JSON"]


class ArchiveMember(NamedTuple):
    """The path of a file in its archive, and the archive as it was given."""

    archive: str
    path: str


@dataclass(frozen=True)
class InputFiles:
    """Expanded inputs of one kind; DuckDB needs the `file_systems` registered."""

    names: list[str]
    kind: FileKind
    file_systems: list[Any]
    empty: list[str]  # files of no byte, left out
    given: list[str]  # every file before archives were unpacked, and those of no byte
    members: dict[str, ArchiveMember]  # by the names of files that were unpacked


def expand_inputs(urls: list[str], folder: Path) -> InputFiles:
    """Return the files of all URLs, globs and folders; archives are unpacked below `folder`."""
    names: list[str] = []
    given: list[str] = []
    remote: list[Any] = []
    members: dict[str, ArchiveMember] = {}
    empty: list[str] = []
    for fs, path in (found for url in urls for found in _iterate_files(url)):
        name = _format_name(fs, path)
        given.append(name)
        if path.lower().endswith(".zip"):
            unpacked = _unpack(fs, path, name, folder)
            for own in unpacked:
                (names if Path(own).stat().st_size else empty).append(own)
            members |= unpacked
        elif fs.size(path) == 0:
            empty.append(name)
        else:  # a web server may not say
            names.append(name)
            remote += [] if is_local(fs) or fs in remote else [fs]
    # Two globs may overlap: all rows of that file would count twice.
    name, times = Counter(given).most_common(1)[0]
    if times > 1:
        raise AccessError(f"input {name} is given {times} times. Give it once")
    if not names:
        raise TooFewRowsError(f"input {given[0]} is empty. Remove it, or write its rows", given)
    # One kind: two scans could give one column two types.
    kinds = sorted({_find_kind(name) for name in names})
    if len(kinds) != 1:
        raise DataError(
            f"the inputs mix {' and '.join(kinds)} files. Prepare from one format at a time"
        )
    return InputFiles(names, kinds[0], remote, empty, given, members)


def list_file_names(urls: Iterable[str]) -> list[str]:
    """Return the name of each file of all URLs, globs and folders, archives unopened."""
    return [_format_name(fs, path) for url in urls for fs, path in _iterate_files(url)]


def make_no_rows_error(names: list[str], given: list[str] | None = None) -> TooFewRowsError:
    """Return the error about files without rows; `given` are those that the caller named."""
    file_list = f"the inputs hold no rows: {', '.join(names)}. Check the path"
    return TooFewRowsError(file_list, given or names)


def _format_name(fs: Any, path: str) -> str:
    return path if is_local(fs) else str(fs.unstrip_protocol(path))


def _find_kind(name: str) -> FileKind:
    suffixes = Path(name.lower()).suffixes
    # DuckDB unpacks these by itself.
    if suffixes[-1:] in ([".gz"], [".zst"]):
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in (".parquet", ".pq"):
        return "Parquet"
    if last in (".json", ".jsonl", ".ndjson"):
        return "JSON"
    if last in (".csv", ".tsv", ".txt"):
        return "text"
    # Hive and Spark may write no suffix: 000000_0, part-00000.
    with fsspec.open(name, "rb") as file:
        return "Parquet" if file.read(4) == b"PAR1" else "text"


def is_marker(path: str, given: str) -> bool:
    """Return whether `path`, found by the folder or glob `given`, is a file that an engine left
    beside its data, such as _SUCCESS, or a text for people, such as README: a part of it begins
    with _ or a dot, or the file is called so, unless `given` spells that part out.

    >>> is_marker("/_logs/day=1/_temporary/0/a.csv", "/_logs/*"), is_marker("/_x-1/a", "/_x-*/*")
    (True, False)"""
    spelled = [part for part in given.split("/") if _is_hidden(part)]
    *folders, name = path.split("/")
    hidden = [part for part in folders if part.startswith(_HIDDEN)] + [name] * _is_hidden(name)
    return any(not any(part == one or fnmatchcase(part, one) for one in spelled) for part in hidden)


def _is_hidden(name: str) -> bool:
    return name.startswith(_HIDDEN) or _FOR_PEOPLE.fullmatch(name) is not None


def _iterate_files(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system and the path of each file of a URL, glob or folder."""
    fs, path = find_file_system(url)
    # A path may hold glob characters: if it exists, it is meant literally.
    if fs.exists(path):
        matches = {path: fs.info(path)}
    else:
        is_glob = any(mark in path for mark in "*?[")
        found_there = fs.glob(path, detail=True) if is_glob else {}
        matches = {p: info for p, info in found_there.items() if not is_marker(p, path)}
    if not matches:
        raise AccessError(f"input {url} does not exist. Check the path")
    found: list[str] = []
    for match in sorted(matches):
        # A "file" is not checked again: that would be one more request to a store for each.
        if matches[match]["type"] == "file" or not fs.isdir(match):
            found.append(match)
            continue
        found += sorted(inside for inside in fs.find(match) if not is_marker(inside, match))
    if not found:
        raise AccessError(f"input {url} is a folder without files. Check the path")
    # "**" matches a folder, and what is in it once more.
    yield from ((fs, name) for name in dict.fromkeys(found))


def _unpack(fs: Any, path: str, name: str, folder: Path) -> dict[str, ArchiveMember]:
    """Return the files of an archive, unpacked below a folder that bears its name in messages."""
    # A folder for each archive, since two may have one name.
    place = Path(tempfile.mkdtemp(dir=folder)) / Path(path).name.removesuffix(".zip")
    try:
        # extractall drops "..", so no member is written elsewhere.
        with fs.open(path) as file, zipfile.ZipFile(file) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
            # Before anything is written. No log packs like this: it is made to fill the disk.
            if num_bytes > max(_LEAST_BOMB, _MOST_PACKED * file.seek(0, os.SEEK_END)):
                raise DataError(
                    f"input {name} unpacks to {num_bytes:,} bytes, over {_MOST_PACKED} times its "
                    "size: no log does. Unpack it yourself, and give the files"
                )
            if num_bytes > shutil.disk_usage(folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            archive.extractall(place)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise DataError(
            f"input {name} cannot be unpacked: {error}. Unpack it yourself, and give the files"
        ) from error
    except OSError as error:
        raise AccessError(
            f"input {name} cannot be unpacked into {place}: {error.strerror or error}. Free space "
            "there, or set TMPDIR to another place"
        ) from error
    files = sorted(str(own) for own in place.rglob("*") if own.is_file())
    return {
        own: ArchiveMember(name, Path(own).relative_to(place).as_posix())
        for own in files
        if not is_marker(own, str(place))
    }
