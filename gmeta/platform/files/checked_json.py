"""JSON that somebody may have edited or cut: read whole, or refused with the reason."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    return json_object(path.read_text(encoding="utf-8"))


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raise ValueError with the reason where there is none."""
    try:
        value = json.loads(text)
        # NaN, infinities and lone surrogates can be read, but neither shown nor written again.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value
