"""Notes on files that were refused for what they hold, kept beside the stream.

Only the newest note about a file names it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import xxhash

from metaio.errors import AccessError, DataError, QuarantinedError, TooFewRowsError
from metaio.format.checked_json import write_checked_json
from metaio.format.manifest import canonical_json
from metaio.format.storage import Storage
from metaio.stream.chain import read_stream_json
from metaio.stream.taken_files import InputFile

QUARANTINE = "quarantine"
_FORMAT = "gmeta-stream-quarantine"


class RefusedFilesError(QuarantinedError):
    """Which files are refused, and why."""

    # rows: for what they hold. unusual: they differ from recent ones, and may be accepted. doubled:
    # their rows were taken already. few, late: to be given again, with newer files.
    def __init__(
        self,
        files: list[InputFile],
        reasons: list[str],
        kind: Literal["rows", "unusual", "doubled", "few", "late"] = "rows",
    ) -> None:
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        self.names = f"{files[0].name}{more}"
        remedy = "Mend the files"
        if kind == "unusual":
            remedy += ", or pass --accept if they are right"
        if kind in ("few", "late"):
            remedy = f"Give newer files and --along {files[0].name}, as gmeta follow does"
        listed_files = f"input {self.names} is quarantined: {'; '.join(reasons)}. {remedy}"
        super().__init__(reasons[0] if kind == "doubled" else listed_files)
        self.files, self.reasons, self.kind = files, reasons, kind


def make_refusal(files: list[InputFile], error: DataError) -> RefusedFilesError:
    """Return the refusal of files for an error about their rows, or about too few of them."""
    if not isinstance(error, TooFewRowsError):
        return RefusedFilesError(files, [str(error)])
    # Its remedy is for a dataset; a stream takes such files together with others.
    what, _, remedy = str(error).rpartition(". ")
    return RefusedFilesError(files, [what or remedy], "few")


@contextmanager
def refuse_files(files: list[InputFile]) -> Iterator[None]:
    """Turn errors about rows into a refusal of their files."""
    try:
        yield
    # Disk or network failed: the same files may be read later.
    except AccessError:
        raise
    except DataError as error:
        raise make_refusal(files, error) from error


def note_refusal(
    root: Path, number: int, refusal: RefusedFilesError, schema: str, num_rows: int | None
) -> None:
    """Write a note on what was refused as increment `number`, and the mark of its schema."""
    files = [file._asdict() for file in refusal.files]
    kind = {"with_next": True} if refusal.kind in ("few", "late") else {}
    body = {"before": number, "files": files, "reasons": refusal.reasons, **kind}
    body |= {"kind": refusal.kind, "rows": num_rows}
    body |= {"schema": schema} if schema else {}
    # The new note is written first: a kill between leaves a file in two notes, not in none.
    clear_quarantine(root, [file.name for file in refusal.files], but=_write(root, body))


def list_quarantine(root: Path) -> list[dict[str, Any]]:
    """Return the notes on refused files."""
    # Keys: before (the increment they were to become), files, reasons, with_next (they only wait
    # for more), kind and rows of the refusal, and of a first increment the mark of its schema.
    return [note for _, note in _list_notes(root)]


def _list_notes(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    storage = Storage(str(root / QUARANTINE))
    paths = sorted((root / QUARANTINE).glob("*.json"))
    return [(path, read_stream_json(storage, path.name, _FORMAT)) for path in paths]


def clear_quarantine(root: Path, names: Collection[str], but: Path | None = None) -> None:
    """Remove files from all notes but one: they are taken, or to be tried again."""
    for path, note in _list_notes(root):
        left = [file for file in note["files"] if file["name"] not in names]
        if path == but or len(left) == len(note["files"]):
            continue
        if left:
            _write(root, {**note, "files": left, "rows": None})
        path.unlink()


def _write(root: Path, body: dict[str, Any]) -> Path:
    # Named by the files: trying the same ones again replaces the note.
    files = sorted([file["name"], file["xxh3"]] for file in body["files"])
    place = root / QUARANTINE / f"{xxhash.xxh3_64_hexdigest(canonical_json(files))}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    body = {key: value for key, value in body.items() if key != "checksum"}
    write_checked_json(place, _FORMAT, body)
    return place
