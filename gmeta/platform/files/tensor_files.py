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


class ChangedFileError(GMetaError):
    """A mapped file was changed in place."""


@final
class MappedFiles:
    """Notices changes of files that a process maps: written to, they would change what it computes
    with; cut short, they would kill it. A file that is replaced by a rename stays as it was."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Begin before the files are checked and mapped. Raise GMetaError."""
        self._files = files
        self._descriptors: list[int] = []
        # Kept open, as other files may stand at their paths by then.
        weakref.finalize(self, _close_all, self._descriptors)
        for file in files:
            try:
                self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise GMetaError(
                    f"{file} cannot be read: {error.strerror}. Export the run again"
                ) from error
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
        found = map(os.fstat, self._descriptors)
        return [(status.st_mtime_ns, status.st_size) for status in found]


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


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
    """Raise OSError for a write that safetensors could not do, as other writes do."""
    try:
        yield
    except SafetensorError as error:
        # Only its text has the number: "I/O error: No space left on device (os error 28)".
        found = re.search(r"([^:]*) \(os error (\d+)\)", str(error))
        number, reason = (int(found[2]), found[1].strip()) if found else (errno.EIO, str(error))
        raise OSError(number, reason, str(file)) from error
