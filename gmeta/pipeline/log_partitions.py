"""Finds the closed partitions of a log, and the state of each of their files."""

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
# Listings of a remote store at a time.
_LISTED_TOGETHER = 16


@dataclass(frozen=True)
class LogPartition:
    """A partition and its files that are not in the stream yet."""

    name: str
    files: tuple[str, ...]
    is_begun: bool = False
    # Of some of the files: a file system need not say.
    sizes: Mapping[str, int] = field(default_factory=dict)
    # Why it cannot be closed; "" if it is.
    against: str = ""


def closed_partitions(pattern: str, closed_after_s: float) -> list[LogPartition]:
    """Return the partitions that match a glob and are closed, or whose age cannot be known."""
    partitions = []
    with _translate_access_errors(pattern):
        fs, root = find_file_system(pattern)
        # fsspec remembers listings: a file that came since the last step would not be seen.
        fs.invalidate_cache()
        for path, inner in _list_files(fs, root):
            # Links to files count too.
            entries = {
                str(p): one for p, one in inner.items() if one["type"] == "file" or fs.isfile(p)
            }
            files = sorted(name for name in entries if not is_marker(name, path))
            # A folder stands for the files in it, but for names that begin with _ or a dot; a file
            # for itself.
            is_folder = list(entries) != [path]
            # _SUCCESS closes a folder, and `closed_after_s` without a write closes either.
            is_closed = f"{path}/{SUCCESS}" in entries or (not is_folder and not closed_after_s)
            against = ""
            if not is_closed and closed_after_s and files:
                age_s = time.time() - max(map(_written_s, entries.values()))
                is_closed = age_s >= closed_after_s
                # The file's clock or this one's is wrong: by its age it would never be closed.
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
    """Yield each path that matches a glob, with all files at or below it."""
    paths = [path for path in sorted(map(str, fs.glob(pattern))) if not is_marker(path, pattern)]
    find = partial(fs.find, detail=True)
    # A store answers slowly: one partition after the other, a year by the hour would take minutes.
    # Other clients, such as FTP's, have one connection, which threads would mix up.
    listings = map_in_order(_LISTED_TOGETHER, find, paths) if fs.async_impl else map(find, paths)
    yield from zip(paths, listings, strict=True)


def _translate_access_errors(place: str) -> translate_errors:
    remedy = "Look at the place, the network and the credentials"
    return translate_storage_errors(f"follow.inputs: {place} cannot be read", remedy)


@dataclass(frozen=True)
class LogState:
    """The state of a log: partitions to prepare, files that wait for others, refused ones, and how
    many partitions are late."""

    waiting: Sequence[LogPartition]
    held: Sequence[str]
    refused: Mapping[str, str]
    num_late: int = 0


def sort_partitions(
    partitions: Sequence[LogPartition],
    taken: Set[str],
    noted: Sequence[Mapping[str, Any]],
    rewritten: Mapping[str, str],
) -> LogState:
    """Return the state of the partitions; `noted` are the quarantine's notes in force."""
    refused = dict(rewritten)
    held: set[str] = set()
    late: set[str] = set()
    for note in noted:
        names = [file["name"] for file in note["files"] if file["name"] not in taken]
        if note.get("with_next"):
            # `gmeta prepare` found too few rows in them for an increment.
            held.update(names)
            late.update(names if note.get("kind") == "late" else ())
        else:
            refused |= dict.fromkeys(names, "; ".join(note["reasons"]))
    waiting = []
    for partition in partitions:
        left = tuple(name for name in partition.files if name not in taken and name not in refused)
        if partition.against:
            refused |= dict.fromkeys(left, partition.against)
        # One more file may make an increment of all.
        elif not held.issuperset(left):
            is_begun = not taken.isdisjoint(partition.files)
            waiting.append(replace(partition, files=left, is_begun=is_begun))
    num_late = sum(not late.isdisjoint(partition.files) for partition in partitions)
    return LogState(waiting, sorted(held), refused, num_late)


@final
class QuarantineChecks:
    """Finds the quarantine's notes in force: all of its files have the bytes that were refused."""

    def __init__(self) -> None:
        # By name: what the file system said of the file, and its hash then.
        self._hash_of: dict[str, tuple[str, str]] = {}

    def notes_in_force(
        self, notes: Sequence[Mapping[str, Any]], taken: Collection[str]
    ) -> list[Mapping[str, Any]]:
        """Return the notes in force; files in `taken` are not looked at."""
        return [
            note
            for note in notes
            # A file that was corrected or removed is tried again, with the others of its note.
            if all(one["name"] in taken or self._is_as_noted(one) for one in note["files"])
        ]

    def find_rewritten(
        self, partitions: Sequence[LogPartition], taken: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Return the files in `taken` whose size and bytes have changed."""
        return [
            name
            for partition in partitions
            for name, size in partition.sizes.items()
            if name in taken
            # The size first, which is free: bytes are read only where it differs.
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
            # Hashed once, and again only when the file system says that the file changed.
            before, xxh3 = self._hash_of.get(name, ("", ""))
            if before != str(info):
                xxh3 = hash_file(name).xxh3
                self._hash_of[name] = str(info), xxh3
        return bool(xxh3 == file["xxh3"])


@final
class TakenFiles:
    """The files that increments of a stream were made of."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._file_of: dict[str, dict[str, Any]] = {}
        # By increment. Each manifest is read once, however long the stream grows.
        self._fingerprint_of: dict[int, str] = {}

    def fingerprints(self) -> dict[int, str]:
        """Return the fingerprint of each increment by its number."""
        self.files()
        return self._fingerprint_of

    def files(self) -> dict[str, dict[str, Any]]:
        """Return each file by its name, as the newest increment has it."""
        numbers = set(list_increment_numbers(self._stream))
        # The newest increment was taken back: its files are free again.
        if not self._fingerprint_of.keys() <= numbers:
            self._file_of, self._fingerprint_of = {}, {}
        new = numbers - self._fingerprint_of.keys()
        if new:
            stream = open_stream(self._stream)
            for number in sorted(new):
                record = stream.record(number)
                for file in record.report["inputs"]:
                    self._file_of[file["name"]] = {**file, "increment": number}
                self._fingerprint_of[number] = record.fingerprint
        return self._file_of


def _written_s(entry: dict[str, Any]) -> float:
    """Return when a file was last written: file systems name that differently."""
    for key in ("mtime", "LastModified", "updated", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    # The file system does not say: such a partition is never closed by its age.
    return time.time()
