"""The folder in which versions of channels are brought and made whole, once a machine: processes
that serve share it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.errors import UserError
from metaio.format.atomic_folder import WITHOUT_LOCKS

CACHE_VARIABLE = "GMETA_CACHE"


def cache_folder() -> Path:
    """Return where versions are made whole: GMETA_CACHE, or a folder of the user's own cache."""
    named_folder = os.environ.get(CACHE_VARIABLE)
    if named_folder:
        return Path(named_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gmeta"


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Wait until no other process works in a folder of the cache, making it if need be, and yield
    it."""
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
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        yield folder
