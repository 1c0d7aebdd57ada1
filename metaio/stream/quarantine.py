"""Windows that were refused for what they hold: noted beside the stream, with the reason."""

from pathlib import Path
from typing import Any

import xxhash

from metaio.errors import QuarantinedError
from metaio.format.checked_json import write_checked
from metaio.format.manifest import canonical_json
from metaio.format.storage import Storage
from metaio.stream.chain import read_of_stream
from metaio.stream.inputs import InputFile

QUARANTINE = "quarantine"
_FORMAT = "gmeta-stream-quarantine"


def quarantined(
    root: Path, number: int, files: list[InputFile], reasons: list[str]
) -> QuarantinedError:
    """Note files that were refused as increment `number`; return the error that says why."""
    place = _place(root, files)
    place.parent.mkdir(parents=True, exist_ok=True)
    noted = [file._asdict() for file in files]
    write_checked(place, _FORMAT, {"before": number, "files": noted, "reasons": reasons})
    more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    return QuarantinedError(
        f"input {files[0].name}{more} is quarantined: {'; '.join(reasons)}. Mend the files, or "
        "pass --accept if they are right"
    )


def clear_quarantine(root: Path, files: list[InputFile]) -> None:
    """Forget that these files were refused: they became an increment."""
    _place(root, files).unlink(missing_ok=True)


def list_quarantine(root: Path) -> list[dict[str, Any]]:
    """Return what was refused and why: `before` (the increment that it was to become), `files`,
    `reasons`.

    Raises:
        FormatError: a note is damaged.
    """
    storage = Storage(str(root / QUARANTINE))
    return [
        read_of_stream(storage, path.name, _FORMAT)
        for path in sorted((root / QUARANTINE).glob("*.json"))
    ]


def _place(root: Path, files: list[InputFile]) -> Path:
    # By content, so that the same files are noted once however often they are tried.
    name = xxhash.xxh3_64_hexdigest(canonical_json(sorted(file.xxh3 for file in files)))
    return root / QUARANTINE / f"{name}.json"
