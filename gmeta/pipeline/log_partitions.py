"""Which partitions of a log are closed, and the state of each of their files: taken by an
increment, refused, held for the next one, or waiting."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, final

from gmeta.platform.files.storage_errors import translate_storage_errors
from gmeta_keys.translate_errors import translate_errors
from metaio.format.storage import find_file_system, is_local
from metaio.prepare.episodes.ordered_map import map_in_order
from metaio.prepare.source.input_files import is_marker
from metaio.quantities import format_duration
from metaio.stream.chain import list_increment_numbers, open_stream
from metaio.stream.taken_files import hash_file

SUCCESS = "_SUCCESS"
_LISTED_TOGETHER = 16


@dataclass(frozen=True)
class LogPartition:
    """A partition: its name and its files, as `gmeta prepare` takes them, some with their sizes;
    others of it may have been taken before. It is closed unless something speaks `against` it."""

    name: str
    files: tuple[str, ...]
    is_begun: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    against: str = ""


def closed_partitions(pattern: str, closed_after_s: float) -> list[LogPartition]:
    """Return the partitions that match a glob and are closed, in the order of their names, and
    those of which that cannot be told.

    A folder is one of all files in it but those whose names begin with _ or a dot, and is closed by
    _SUCCESS; a file is one of itself. Either is closed too, with `closed_after_s`, once nothing was
    written to it for so long.
    """
    partitions = []
    with _translate_access_errors(pattern):
        fs, root = find_file_system(pattern)
        fs.invalidate_cache()
        for path, inner in _list_files(fs, root):
            # A link to a file is one, too.
            entries = {
                str(p): one for p, one in inner.items() if one["type"] == "file" or fs.isfile(p)
            }
            files = sorted(name for name in entries if not is_marker(name, path))
            is_folder = list(entries) != [path]
            is_closed = f"{path}/{SUCCESS}" in entries or (not is_folder and not closed_after_s)
            against = ""
            if not is_closed and closed_after_s and files:
                age_s = time.time() - max(map(_written_s, entries.values()))
                is_closed = age_s >= closed_after_s
                if age_s < -closed_after_s:
                    against = (
                        f"it was written {format_duration(-age_s)} from now, so that its age "
                        "does not "
                        f"close it. Correct the clock that is wrong and touch it, or add {SUCCESS}"
                    )
            if files and (is_closed or against):
                url_of = {
                    name: name if is_local(fs) else str(fs.unstrip_protocol(name)) for name in files
                }
                sizes = {url: entries[name].get("size") for name, url in url_of.items()}
                known = {url: size for url, size in sizes.items() if size is not None}
                partitions.append(LogPartition(path, tuple(url_of.values()), False, known, against))
    return partitions


def _list_files(fs: Any, pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each path that matches a glob, with all files at or below it by path. A store answers
    after a while: one partition after the other, a year by the hour would take minutes. Other
    clients, such as that of FTP, have one connection, which threads would mix up."""
    paths = [path for path in sorted(map(str, fs.glob(pattern))) if not is_marker(path, pattern)]
    find = partial(fs.find, detail=True)
    listings = map_in_order(_LISTED_TOGETHER, find, paths) if fs.async_impl else map(find, paths)
    yield from zip(paths, listings, strict=True)


def _translate_access_errors(place: str) -> translate_errors:
    remedy = "Look at the place, the network and the credentials"
    return translate_storage_errors(f"follow.inputs: {place} cannot be read", remedy)


@dataclass(frozen=True)
class LogState:
    """The state of a log: the partitions of which an increment is to be made, the first one first,
    the files that wait for others, and what is refused, and why."""

    waiting: Sequence[LogPartition]
    held: Sequence[str]
    refused: Mapping[str, str]


def sort_partitions(
    partitions: Sequence[LogPartition],
    taken: Set[str],
    noted: Sequence[Mapping[str, Any]],
    rewritten: Mapping[str, str],
) -> LogState:
    """Return the state of the partitions, from the files that increments took, the quarantine's
    notes that still hold, and why taken files that have changed since are refused.

    Files are held where `gmeta prepare` found that they make no increment by themselves.
    """
    refused = dict(rewritten)
    held: set[str] = set()
    for note in noted:
        names = [file["name"] for file in note["files"] if file["name"] not in taken]
        if note.get("with_next"):
            held.update(names)
        else:
            refused |= dict.fromkeys(names, "; ".join(note["reasons"]))
    waiting = []
    for partition in partitions:
        left = tuple(name for name in partition.files if name not in taken and name not in refused)
        if partition.against:
            refused |= dict.fromkeys(left, partition.against)
        elif not held.issuperset(left):  # one more may make an increment of all
            is_begun = not taken.isdisjoint(partition.files)
            waiting.append(replace(partition, files=left, is_begun=is_begun))
    return LogState(waiting, sorted(held), refused)


@final
class QuarantineChecks:
    """Tells which notes of the quarantine hold: all of its files are there with the bytes that were
    refused. A file that was mended, or taken away, is tried again with the others of its note."""

    def __init__(self) -> None:
        self._hash_of: dict[str, tuple[str, str]] = {}  # with what the file system said then

    def notes_in_force(
        self, notes: Sequence[Mapping[str, Any]], taken: Collection[str]
    ) -> list[Mapping[str, Any]]:
        """Return the notes that hold; files that were taken are not looked at."""
        return [
            note
            for note in notes
            if all(one["name"] in taken or self._is_as_noted(one) for one in note["files"])
        ]

    def find_rewritten(
        self, partitions: Sequence[LogPartition], taken: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Return the taken files whose size has changed, and, as is checked then, their bytes."""
        return [
            name
            for partition in partitions
            for name, size in partition.sizes.items()
            if name in taken
            and size != taken[name]["num_bytes"]
            and not self._is_as_noted(taken[name])
        ]

    def _is_as_noted(self, file: Mapping[str, Any]) -> bool:
        name = file["name"]
        with _translate_access_errors(name):
            fs, path = find_file_system(name)
            try:
                info = fs.info(path)
            except FileNotFoundError:
                return False
            # Read once, and again when it was written to.
            before, xxh3 = self._hash_of.get(name, ("", ""))
            if before != str(info):
                xxh3 = hash_file(name).xxh3
                self._hash_of[name] = str(info), xxh3
        return bool(xxh3 == file["xxh3"])


@final
class TakenFiles:
    """Which files the increments of a stream took; each manifest is read once, however long the
    stream grows."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._file_of: dict[str, dict[str, Any]] = {}
        self._known: set[int] = set()

    def files(self) -> dict[str, dict[str, Any]]:
        """Return what each file was as the newest `increment` took it, by its name."""
        numbers = set(list_increment_numbers(self._stream))
        if not self._known <= numbers:  # the newest was taken back: its files are free again
            self._file_of, self._known = {}, set()
        new = numbers - self._known
        if new:
            stream = open_stream(self._stream)
            for number in sorted(new):
                for file in stream.record(number).report["inputs"]:
                    self._file_of[file["name"]] = {**file, "increment": number}
            self._known |= new
        return self._file_of


def _written_s(entry: dict[str, Any]) -> float:
    """Return when a file was last written, as the file system says: a time or seconds."""
    for key in ("mtime", "LastModified", "updated", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return time.time()  # it does not say: never closed by its age
