"""The folder in which versions of channels are brought and made full, once a machine."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.errors import UserError
from metaio.format.atomic_folder import WITHOUT_LOCKS

CACHE_VARIABLE = "GMETA_CACHE"


def cache_folder() -> Path:
    """Return the cache: the folder GMETA_CACHE, or gmeta's in the user's own cache."""
    named_folder = os.environ.get(CACHE_VARIABLE)
    if named_folder:
        return Path(named_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmeta"


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Make a folder of the cache if need be, and yield it once no other process works in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".cache.lock").open("a")
    except OSError as error:
        raise UserError(
            f"the cache {folder} cannot be written: {error.strerror}. "
            f"Set {CACHE_VARIABLE} to a folder that can"
        ) from error
    with lock:
        try:
            # The kernel releases it with the process: one that is killed locks nobody out.
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks: there each process does the work again.
            if error.errno not in WITHOUT_LOCKS:
                raise
        yield folder
