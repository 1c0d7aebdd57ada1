"""JSON that somebody may have edited or cut: read whole, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

from gmeta.errors import GMetaError
from metaio.errors import FormatError
from metaio.format.checked_json import checked


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: see json_object.
    """
    return json_object(path.read_text(encoding="utf-8"))


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is.

    Raises:
        ValueError: it is none, or holds NaN, an infinity or half of a character, which could
            neither be shown nor written again.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def read_checked(path: Path, kind: str) -> dict[str, Any]:
    """Return the object that metaio's `write_checked` wrote into a file of this kind, its checksum
    included.

    Raises:
        FileNotFoundError: there is none.
        GMetaError: it was altered, is of another kind, or another release wrote it.
    """
    remedy = "Bring the file back from a copy, or make it anew"
    try:
        return checked(path.read_bytes(), str(path), kind, remedy)
    except FormatError as error:
        raise GMetaError(str(error)) from error
