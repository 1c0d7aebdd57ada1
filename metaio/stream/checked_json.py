"""JSON files of a stream that carry their own checksum, and are there whole or not at all."""

import json
from pathlib import Path
from typing import Any

from metaio.errors import FormatError
from metaio.format.destination import flush_to_disk
from metaio.format.manifest import canonical_json, xxh3_hex
from metaio.format.storage import Storage

VERSION = 1


def write_checked(path: Path, kind: str, body: dict[str, Any]) -> None:
    """Write a JSON file of this kind; it takes its name once it is on the disk."""
    # There and back, so that the checksum sees what a reader will see: lists, not tuples.
    body = json.loads(json.dumps({"format": kind, "version": VERSION, **body}, default=vars))
    body["checksum"] = xxh3_hex(canonical_json(body))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(json.dumps(body, indent=1).encode())
    flush_to_disk([partial])
    partial.replace(path)
    flush_to_disk([path.parent])


def read_checked(storage: Storage, path: str, kind: str) -> dict[str, Any]:
    """Return what `write_checked` was given.

    Raises:
        FormatError: the file is missing, of another kind or version, or was altered.
    """
    name = storage.name(path)
    try:
        body = json.loads(storage.read(path))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is not JSON: {error}. {_REMEDY}") from error
    if not isinstance(body, dict) or body.get("format") != kind:
        raise FormatError(f"{name} is no file of format {kind}. {_REMEDY}")
    if body.get("version") != VERSION:
        raise FormatError(
            f"{name} has version {body.get('version')}, this release reads version {VERSION}. Read "
            "it with the release that wrote it"
        )
    if body.pop("checksum", None) != xxh3_hex(canonical_json(body)):
        raise FormatError(f"{name} does not match its own checksum: it was edited. {_REMEDY}")
    return body


_REMEDY = "gmeta prepare --extend alone writes it: put back the file that it wrote"
