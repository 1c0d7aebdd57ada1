"""Checkpoints and models altered by an attacker who made their checksums fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gmeta.platform.files.checksums import describe_file
from metaio.format.manifest import canonical_json, xxh3_hex


def seal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON at `path`, and make its own checksum fit again."""
    body = json.loads(path.read_text())
    body.pop("checksum")
    change(body)
    path.write_text(json.dumps({**body, "checksum": xxh3_hex(canonical_json(body))}))


def replace_file(folder: Path, listed_in: str, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint or model by `content`, and make all checksums fit."""
    (folder / name).write_bytes(content)
    seal(
        folder / listed_in,
        lambda body: body["files"].update({name: vars(describe_file(folder / name))}),
    )
