"""Tensors in a file of an exported model, mapped, and a guard against changes of such files."""

import errno
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gmeta.errors import GMetaError
from gmeta.platform.files.storage_errors import translate_storage_errors


class ChangedFileError(GMetaError):
    """A mapped file was changed in place."""


@final
class MappedFiles:
    """Notices changes of files that a process maps: written to, they would change what it computes
    with; cut short, they would kill it. A file that is replaced by a rename stays as it was."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Begin before the files are checked and mapped. Raise GMetaError."""
        self._files = files
        # Kept open, as other files may stand at their paths by then.
        with translate_storage_errors("a model cannot be read", "Export the run again"):
            self._descriptors = [os.open(file, os.O_RDONLY) for file in files]
        weakref.finalize(self, list, map(os.close, self._descriptors))
        self._stamps = self._stat()

    def find_changed(self) -> Path | None:
        """Return a file that was changed since, or None."""
        pairs = zip(self._files, self._stamps, self._stat(), strict=True)
        return next((file for file, before, now in pairs if before != now), None)

    def check(self) -> None:
        """Raise ChangedFileError if a file was changed since."""
        if (file := self.find_changed()) is not None:
            raise ChangedFileError(
                f"{file} was changed in place after it was loaded: it holds what nobody has "
                "checked. Replace a folder in use as a whole (gmeta export --overwrite does), and "
                "load it again"
            )

    def _stat(self) -> list[tuple[int, int]]:
        # Not the time of a change of status, which a removal by its owner sets as well.
        return [(one.st_mtime_ns, one.st_size) for one in map(os.fstat, self._descriptors)]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped."""
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise GMetaError(
            f"{file} cannot be read: {error}. Copy the folder again, or export the run again"
        ) from error
    return tensors


@contextmanager
def translate_write_errors(file: Path) -> Iterator[None]:
    """Raise OSError that names the file for a write that could not be done, by safetensors too."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    except SafetensorError as error:
        # Only its text has the number: "I/O error: No space left on device (os error 28)".
        found = re.search(r"([^:]*) \(os error (\d+)\)", str(error))
        number, reason = (int(found[2]), found[1].strip()) if found else (errno.EIO, str(error))
        raise OSError(number, reason, str(file)) from error
