"""Files that were refused for what they hold: noted beside the stream, with the reason. A file
stands in the newest note alone that names it."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import xxhash

from metaio.errors import QuarantinedError
from metaio.format.checked_json import write_checked_json
from metaio.format.manifest import canonical_json
from metaio.format.storage import Storage
from metaio.stream.chain import read_stream_json
from metaio.stream.taken_files import InputFile

QUARANTINE = "quarantine"
_FORMAT = "gmeta-stream-quarantine"


class RefusedFilesError(QuarantinedError):
    """Which files are refused, and why: for what their `rows` hold; as they are `unusual` beside
    recent ones, which may be accepted; as they are `doubled`, while others of the call are not; or
    as they are too `few` for an increment of their own, and are to be given together with newer
    ones."""

    def __init__(
        self,
        files: list[InputFile],
        reasons: list[str],
        kind: Literal["rows", "unusual", "doubled", "few"] = "rows",
    ) -> None:
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        self.names = f"{files[0].name}{more}"
        remedy = "Mend the files"
        if kind == "unusual":
            remedy += ", or pass --accept if they are right"
        if kind == "few":
            remedy = f"Give newer files and --along {files[0].name}, as gmeta follow does"
        listed_files = f"input {self.names} is quarantined: {'; '.join(reasons)}. {remedy}"
        super().__init__(reasons[0] if kind == "doubled" else listed_files)
        self.files, self.reasons, self.kind = files, reasons, kind


def note_refusal(root: Path, number: int, refusal: RefusedFilesError, schema: str) -> None:
    """Note what was refused as increment `number`, and the mark of a schema that may change yet."""
    files = [file._asdict() for file in refusal.files]
    kind = {"with_next": True} if refusal.kind == "few" else {}
    body = {"before": number, "files": files, "reasons": refusal.reasons, **kind}
    body |= {"schema": schema} if schema else {}
    _forget(root, [file.name for file in refusal.files], but=_write(root, body))


def clear_quarantine(root: Path, files: Iterable[InputFile]) -> None:
    """Forget that these files were refused: they became part of an increment."""
    _forget(root, {file.name for file in files})


def list_quarantine(root: Path) -> list[dict[str, Any]]:
    """Return what was refused and why: `before` (the increment that it was to become), `files`,
    `reasons`, `with_next` where the files only wait for more, and for a first increment the mark of
    the `schema`."""
    return [note for _, note in _list_notes(root)]


def _list_notes(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    storage = Storage(str(root / QUARANTINE))
    paths = sorted((root / QUARANTINE).glob("*.json"))
    return [(path, read_stream_json(storage, path.name, _FORMAT)) for path in paths]


def _forget(root: Path, names: Collection[str], but: Path | None = None) -> None:
    """Take files out of all notes but one."""
    for path, note in _list_notes(root):
        left = [file for file in note["files"] if file["name"] not in names]
        if path == but or len(left) == len(note["files"]):
            continue
        if left:
            _write(root, {**note, "files": left})
        path.unlink()


def _write(root: Path, body: dict[str, Any]) -> Path:
    # By the files, so that the same ones are noted once however often they are tried.
    files = sorted([file["name"], file["xxh3"]] for file in body["files"])
    place = root / QUARANTINE / f"{xxhash.xxh3_64_hexdigest(canonical_json(files))}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    body = {key: value for key, value in body.items() if key != "checksum"}
    write_checked_json(place, _FORMAT, body)
    return place
