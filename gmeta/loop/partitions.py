"""Which partitions of a log are closed, and which of their files no increment has taken yet."""

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any, final

from metaio.format.storage import file_system, is_local
from metaio.stream.chain import increment_numbers, open_stream

SUCCESS = "_SUCCESS"


@dataclass(frozen=True)
class Partition:
    """A closed partition: its name and its files, as `gmeta prepare` takes them."""

    name: str
    files: tuple[str, ...]


def closed_partitions(pattern: str, closed_after_s: float) -> list[Partition]:
    """Return the partitions that match a glob and are closed, in the order of their names.

    A folder is one of all files in it but those whose names begin with _ or a dot, and is closed by
    _SUCCESS; a file is one of itself. Either is closed too, with `closed_after_s`, once nothing was
    written to it for so long.
    """
    fs, root = file_system(pattern)
    fs.invalidate_cache()
    found = []
    for path in sorted(map(str, fs.glob(root))):
        if path.rsplit("/", 1)[-1].startswith(("_", ".")):
            continue
        entries = [one for one in fs.find(path, detail=True).values() if one["type"] == "file"]
        names = {str(one["name"]): one for one in entries}
        is_folder = list(names) != [path]
        inner = {name.removeprefix(path + "/") for name in names}
        files = sorted(
            name for name in names if not is_folder or not _is_hidden(name.removeprefix(path + "/"))
        )
        is_closed = SUCCESS in inner or (not is_folder and not closed_after_s)
        if not is_closed and closed_after_s and files:
            newest_s = max(_written_s(one) for one in entries)
            is_closed = time.time() - newest_s >= closed_after_s
        if files and is_closed:
            full = tuple(name if is_local(fs) else str(fs.unstrip_protocol(name)) for name in files)
            found.append(Partition(path, full))
    return found


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


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _written_s(entry: dict[str, Any]) -> float:
    """Return when a file was last written, as the file system says: a time or seconds."""
    for key in ("mtime", "LastModified", "updated", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return time.time()  # it does not say: never closed by its age
