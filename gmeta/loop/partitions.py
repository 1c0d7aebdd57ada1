"""Which partitions of a log are closed, and how it stands with each of their files: taken by an
increment, refused, held for the next one, or waiting."""

import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any, final

from gmeta.files.places import failing_at
from gmeta_keys.boundary import failing_as
from metaio.format.storage import file_system, is_local
from metaio.prepare.inputs import is_marker
from metaio.stream.chain import increment_numbers, open_stream
from metaio.stream.inputs import described

SUCCESS = "_SUCCESS"


@dataclass(frozen=True)
class Partition:
    """A closed partition: its name and its files, as `gmeta prepare` takes them; others of it may
    have been taken before."""

    name: str
    files: tuple[str, ...]
    is_begun: bool = False


def closed_partitions(pattern: str, closed_after_s: float) -> list[Partition]:
    """Return the partitions that match a glob and are closed, in the order of their names.

    A folder is one of all files in it but those whose names begin with _ or a dot, and is closed by
    _SUCCESS; a file is one of itself. Either is closed too, with `closed_after_s`, once nothing was
    written to it for so long.

    Raises:
        GMetaError: the place cannot be listed.
    """
    found = []
    with _reached(pattern):
        fs, root = file_system(pattern)
        fs.invalidate_cache()
        for path in sorted(map(str, fs.glob(root))):
            if is_marker(path, root):
                continue
            inner = fs.find(path, detail=True).items()
            # A link to a file is one, too.
            entries = {str(p): one for p, one in inner if one["type"] == "file" or fs.isfile(p)}
            files = sorted(name for name in entries if not is_marker(name, path))
            is_folder = list(entries) != [path]
            is_closed = f"{path}/{SUCCESS}" in entries or (not is_folder and not closed_after_s)
            if not is_closed and closed_after_s and files:
                newest_s = max(map(_written_s, entries.values()))
                is_closed = time.time() - newest_s >= closed_after_s
            if files and is_closed:
                full = tuple(
                    name if is_local(fs) else str(fs.unstrip_protocol(name)) for name in files
                )
                found.append(Partition(path, full))
    return found


def _reached(place: str) -> failing_as:
    remedy = "Look at the place, the network and the credentials"
    return failing_at(f"follow.inputs: {place} cannot be read", remedy)


@dataclass(frozen=True)
class Standing:
    """How it stands with a log: the partitions of which an increment is to be made, the first one
    first, the files that wait for others, and what is refused, and why."""

    waiting: Sequence[Partition]
    held: Sequence[str]
    refused: Mapping[str, str]


def standing(
    partitions: Sequence[Partition],
    taken: Set[str],
    noted: Sequence[Mapping[str, Any]],
) -> Standing:
    """Return how it stands with closed partitions, given the files that increments took, and the
    notes of the quarantine that hold.

    Held are files that make no increment alone, as `gmeta prepare` found.
    """
    refused: dict[str, str] = {}
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
        if not held.issuperset(left):  # one more may make an increment of all
            waiting.append(Partition(partition.name, left, not taken.isdisjoint(partition.files)))
    return Standing(waiting, sorted(held), refused)


@final
class NotedFiles:
    """Tells which notes of the quarantine hold: all of its files are there with the bytes that were
    refused. A file that was mended, or taken away, is tried again with the others of its note."""

    def __init__(self) -> None:
        self._hash_of: dict[str, tuple[str, str]] = {}  # with what the file system said then

    def holding(
        self, notes: Sequence[Mapping[str, Any]], taken: Collection[str]
    ) -> list[Mapping[str, Any]]:
        """Return the notes that hold; of files that were taken there is nothing to be said.

        Raises:
            GMetaError, MetaIOError: a file cannot be read.
        """
        return [
            note
            for note in notes
            if all(one["name"] in taken or self._is_as_noted(one) for one in note["files"])
        ]

    def _is_as_noted(self, file: Mapping[str, Any]) -> bool:
        name = file["name"]
        with _reached(name):
            fs, path = file_system(name)
            try:
                info = fs.info(path)
            except FileNotFoundError:
                return False
            # Read once, and again when it was written to.
            before, xxh3 = self._hash_of.get(name, ("", ""))
            if before != str(info):
                xxh3 = described(name).xxh3
                self._hash_of[name] = str(info), xxh3
        return bool(xxh3 == file["xxh3"])


@final
class TakenFiles:
    """Which files the increments of a stream took; each manifest is read once, however long the
    stream grows."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._increment_of: dict[str, int] = {}
        self._known: set[int] = set()

    def files(self) -> dict[str, int]:
        """Return the increment that took each file, by the file's name.

        Raises:
            FormatError: a manifest is damaged.
        """
        numbers = set(increment_numbers(self._stream))
        if not self._known <= numbers:  # the newest was taken back: its files are free again
            self._increment_of, self._known = {}, set()
        new = numbers - self._known
        if new:
            stream = open_stream(self._stream)
            for number in sorted(new):
                for file in stream.record(number).report["inputs"]:
                    self._increment_of[file["name"]] = number
            self._known |= new
        return self._increment_of


def _written_s(entry: dict[str, Any]) -> float:
    """Return when a file was last written, as the file system says: a time or seconds."""
    for key in ("mtime", "LastModified", "updated", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return time.time()  # it does not say: never closed by its age
