"""Tensors in a file of an exported model."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gmeta.errors import GMetaError


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped.

    Raises:
        GMetaError: it cannot be read.
    """
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise GMetaError(
            f"{file} cannot be read: {error}. Copy the folder again, or export the run again"
        ) from error
    return tensors
