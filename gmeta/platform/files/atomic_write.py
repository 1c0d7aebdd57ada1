"""Files that exist whole or not at all, whatever happens while they are written."""

import fcntl
import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_JUST_OPENED_S = 5.0  # its writer may not have its lock yet


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name only once it is written and on the disk."""
    # After a failure `path` is as it was before and nothing is left beside it. What a killed
    # process left there is removed by the next write.
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        # A writer holds a lock on its file; the lock of a killed one is gone.
        with suppress(OSError), leftover.open("rb") as killed:
            fcntl.flock(killed, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while somebody writes it
            if time.time() - os.fstat(killed.fileno()).st_mtime > _JUST_OPENED_S:
                leftover.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            with suppress(OSError):  # without locks, the next write removes nothing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            # Before the rename, or a power cut could leave the name with nothing in it.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The new name survives a power cut only once its folder is on the disk, too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a file that exists whole or not at all."""
    with open_atomically(path) as file:
        file.write(content)
