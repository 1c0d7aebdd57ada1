"""verdict.json: the judge's verdict on one candidate, with its own checksum."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmeta.platform.files.checked_json import read_json
from metaio.format.checked_json import has_shape, write_checked_json
from metaio.format.manifest import compute_checksum

VERDICT_FORMAT = "gmeta-verdict"
# Of the file; an earlier release wrote none of them.
_KEYS = {"format", "version", "checksum"}
_SHAPE = {"verdict": str, "model": str, "reasons": [str]}


def write_verdict(path: Path, verdict: Mapping[str, Any]) -> None:
    """Write a verdict, whole or not at all."""
    write_checked_json(path, VERDICT_FORMAT, verdict)


def read_verdict(path: Path) -> dict[str, Any]:
    """Return the verdict in a file. Raise ValueError for one that is damaged, with the reason."""
    body = read_json(path)
    if _KEYS & body.keys():
        if body.get("format") != VERDICT_FORMAT or body.get("checksum") != compute_checksum(body):
            raise ValueError("it does not match its own checksum: it was edited")
    elif body.get("verdict") not in ("promote", "refuse"):
        raise ValueError("it neither promotes nor refuses")
    verdict = {key: value for key, value in body.items() if key not in _KEYS}
    if not is_verdict(verdict):
        raise ValueError("its model or reasons are of another kind")
    return verdict


def is_verdict(value: Any) -> bool:
    """Return whether a JSON value has the shape of a verdict, as far as it is used."""
    known = {"verdict": "promote", "model": "", "reasons": []}
    return isinstance(value, dict) and has_shape(known | value, _SHAPE)
