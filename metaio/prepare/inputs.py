"""Which files the inputs of prepare are: files, globs, folders and zip archives, on any URL."""

import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from metaio.errors import DataError
from metaio.format.storage import file_system, is_local

FileKind = Literal["Parquet", "text", "JSON"]


@dataclass(frozen=True)
class Inputs:
    """Expanded inputs of one kind; `file_systems` are those that DuckDB cannot read by itself."""

    names: list[str]
    kind: FileKind
    file_systems: list[Any]
    num_empty: int  # files of no byte, left out


def expand(urls: list[str], folder: Path) -> Inputs:
    """Return the files of all URLs, globs and folders; archives are unpacked below `folder`.

    Raises:
        DataError: one does not exist or cannot be unpacked, all are empty, or kinds are mixed.
    """
    names: list[str] = []
    empty: list[str] = []
    remote: list[Any] = []
    for fs, path in (found for url in urls for found in _files(url, folder)):
        protocol = fs.protocol[0] if isinstance(fs.protocol, tuple) else fs.protocol
        name = path if is_local(fs) else f"{protocol}://{path}"
        (names if fs.size(path) else empty).append(name)
        remote += [] if is_local(fs) or fs in remote else [fs]
    if not names:
        raise DataError(f"input {empty[0]} is empty. Remove it, or write its rows")
    # One scan reads one kind; two scans could give a column two types.
    kinds = sorted({_kind(name) for name in names})
    if len(kinds) != 1:
        raise DataError(
            f"the inputs mix {' and '.join(kinds)} files. Prepare from one format at a time"
        )
    return Inputs(names, kinds[0], remote, len(empty))


def _kind(name: str) -> FileKind:
    suffixes = Path(name.lower()).suffixes
    if suffixes[-1:] in ([".gz"], [".zst"]):
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in (".parquet", ".pq"):
        return "Parquet"
    return "JSON" if last in (".json", ".jsonl", ".ndjson") else "text"


def _is_marker(path: str) -> bool:
    """Tell whether an engine left this file beside its data, such as _SUCCESS."""
    return path.rsplit("/", 1)[-1].startswith(("_", "."))


def _files(url: str, folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield the file system and the path of each file of a URL, glob, folder or archive."""
    fs, path = file_system(url)
    if any(mark in path for mark in "*?["):
        matches = {p: info for p, info in fs.glob(path, detail=True).items() if not _is_marker(p)}
    else:
        matches = {path: fs.info(path)} if fs.exists(path) else {}
    if not matches:
        raise DataError(f"input {url} does not exist. Check the path")
    found: list[str] = []
    for match in sorted(matches):
        # "file" is taken at its word: an object store would be asked once more for each of them.
        if matches[match]["type"] == "file" or not fs.isdir(match):
            found.append(match)
            continue
        found += sorted(inside for inside in fs.find(match) if not _is_marker(inside))
    if not found:
        raise DataError(f"input {url} is a folder without files. Check the path")
    for name in dict.fromkeys(found):  # "**" matches a folder, and what is in it once more
        if name.lower().endswith(".zip"):
            inside = sorted(str(path) for path in _unpacked(fs, name, folder) if path.is_file())
            yield from ((file_system("/")[0], path) for path in inside if not _is_marker(path))
        else:
            yield fs, name


def _unpacked(fs: Any, name: str, folder: Path) -> Iterator[Path]:
    """Return what an archive holds, unpacked below a folder that messages will speak of."""
    place = Path(tempfile.mkdtemp(dir=folder)) / Path(name).name.removesuffix(".zip")
    try:
        # Members that would lead elsewhere are put below, too: zipfile leaves out such steps.
        with fs.open(name) as file, zipfile.ZipFile(file) as archive:
            archive.extractall(place)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise DataError(
            f"input {name} cannot be unpacked: {error}. Unpack it yourself, and give the files"
        ) from error
    return place.rglob("*")
