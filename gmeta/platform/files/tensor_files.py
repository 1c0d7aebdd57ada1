"""Tensors in a file of an exported model."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gmeta.errors import GMetaError


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
