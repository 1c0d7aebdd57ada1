"""JSON files that carry their own checksum: an edited, cut or foreign one is named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmeta.errors import GMetaError
from gmeta.files.checked_json import read_json
from gmeta.files.whole import write_whole
from metaio.format.manifest import canonical_json, xxh3_hex


def write_sealed(path: Path, form: str, version: int, body: Mapping[str, Any]) -> None:
    """Write a JSON object, with its format, version and checksum, whole or not at all."""
    sealed: dict[str, Any] = {"format": form, "version": version, **body}
    sealed["checksum"] = xxh3_hex(canonical_json(sealed))
    write_whole(path, (json.dumps(sealed, indent=1) + "\n").encode())


def read_sealed(path: Path, form: str, version: int) -> dict[str, Any]:
    """Return the object that `write_sealed` wrote, its checksum included.

    Raises:
        FileNotFoundError: there is none.
        GMetaError: it was altered, or another release wrote it.
    """
    remedy = "Bring the file back from a copy, or make it anew"
    try:
        body = read_json(path)
    except ValueError as error:
        raise GMetaError(f"{path} is not JSON: it was cut short or edited. {remedy}") from error
    found = body.get("format"), body.get("version")
    if found != (form, version):
        raise GMetaError(
            f"{path} has format {found[0]!r:.40} of version {found[1]!r:.20}: this release reads "
            f"{form!r} of version {version}. Use the release that wrote it"
        )
    signed = {key: value for key, value in body.items() if key != "checksum"}
    if body.get("checksum") != xxh3_hex(canonical_json(signed)):
        raise GMetaError(f"{path} does not match its own checksum: it was edited. {remedy}")
    return body
