"""The files of one checkpoint, and whether they are what was written.

torch.distributed.checkpoint's format, with progress.json beside it: how far the run was, with which
model, algorithm and loss, and the checksums of all other files and its own.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from gmeta.checkpoints.index import INDEX_FILE, read_index
from gmeta.checkpoints.lineage import lineage_of
from gmeta.errors import GMetaError
from gmeta.files.checked_json import read_json
from gmeta.files.checksums import FileEntry, differences, entries_of
from gmeta.runs.progress import Progress
from metaio.format.manifest import canonical_json, xxh3_hex

PROGRESS_FILE = "progress.json"
FALL_BACK = "Remove it to fall back to the one before"
# What reading a damaged checkpoint raises. Its index is a pickle, and by pickle's documentation a
# wrong bit of one may raise nearly anything.
DAMAGE = (
    OSError,
    ValueError,
    RuntimeError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    ImportError,
    OverflowError,
    MemoryError,
    pickle.UnpicklingError,
    CheckpointException,
)


def read_progress(path: Path) -> Progress:
    """Return where in its run a checkpoint stands.

    Raises:
        GMetaError: its progress.json is missing or broken.
    """
    about = read_about(path)
    return Progress(**{item.name: about[item.name] for item in fields(Progress)})


def read_about(path: Path) -> dict[str, Any]:
    """Return a checkpoint's progress.json: where it stands, who wrote it, what its files are.

    Raises:
        GMetaError: the file is missing or broken.
    """
    try:
        about = read_json(path / PROGRESS_FILE)
        checksum = about.pop("checksum", None)
        # Older releases wrote neither.
        if (checksum or "files" in about) and checksum != xxh3_hex(canonical_json(about)):
            raise ValueError("it does not match its own checksum")
        # Not one is there by default: a step that is not said would be taken for the first.
        for item in fields(Progress):
            _check_number(item.name, about[item.name])
        _check_number("world_size", about.get("world_size", 1))
        if not isinstance(about.get("config", {}), dict):
            raise ValueError("its config is not an object")
        entries_of(about.get("files", {}))
        lineage_of(about)
    except (OSError, ValueError, LookupError) as error:
        raise GMetaError(
            f"checkpoint {path} cannot be loaded: its {PROGRESS_FILE} is missing or broken "
            f"({error!r}). {FALL_BACK}"
        ) from error
    return about


def _check_number(name: str, value: Any) -> None:
    if name == "best_score":
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{name} is {value!r:.60}, not a number")
    elif type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r:.60}, not a count")


def describe(progress: Progress, writer: Mapping[str, Any], files: Mapping[str, FileEntry]) -> str:
    """Return the text of progress.json: where the checkpoint stands, who the `writer` was, and the
    checkpoint's other files."""
    listed = {name: asdict(entry) for name, entry in files.items()}
    about = {**asdict(progress), **writer, "files": listed}
    about["checksum"] = xxh3_hex(canonical_json(about))
    return json.dumps(about)


def files_of(about: Mapping[str, Any]) -> dict[str, FileEntry]:
    """Return sizes and checksums of a checkpoint's files but progress.json; none of what an older
    release wrote."""
    return entries_of(about.get("files", {}))


@contextmanager
def damage_told(path: Path, remedy: str = FALL_BACK) -> Iterator[None]:
    """Turn what reading a damaged checkpoint raises into one line."""
    try:
        yield
    except DAMAGE as error:
        raise GMetaError(
            f"checkpoint {path} cannot be read: {reason_of(error).rstrip('.')}. {remedy}"
        ) from error


def check_files(path: Path, part: int = 0, num_parts: int = 1, remedy: str = FALL_BACK) -> None:
    """Check one of so many parts of a checkpoint's files against their checksums.

    Raises:
        GMetaError: a file is missing, cut short or altered; `remedy` says what to do.
    """
    about = read_about(path)
    with damage_told(path, remedy):
        for problem in file_problems(path, about, intact_index(path, about), part, num_parts):
            raise ValueError(problem)


def intact_index(path: Path, about: Mapping[str, Any]) -> Metadata:
    """Return a checkpoint's index, held against its checksum first.

    Raises:
        OSError, ValueError: it is altered, or as read_index.
    """
    index = {name: entry for name, entry in files_of(about).items() if name == INDEX_FILE}
    # First: what is told of wrong bits is then that they are wrong, not what they came to mean.
    for difference in differences(path, index, PROGRESS_FILE, contents=True):
        raise ValueError(difference)
    return read_index(path)


def file_problems(
    path: Path,
    about: Mapping[str, Any],
    index: Metadata,
    part: int = 0,
    num_parts: int = 1,
    *,
    contents: bool = True,
) -> Iterator[str]:
    """Yield one line for each file, of one part of all, that is not what was written; without
    `contents` only what sizes tell, as of a checkpoint without checksums.
    """
    files = dict(sorted(files_of(about).items())[part::num_parts])
    if "files" in about:
        yield from differences(path, files, PROGRESS_FILE, contents=contents)
    else:
        yield from _missing(path, index)


def _missing(path: Path, index: Metadata) -> Iterator[str]:
    """Yield the files that the index names and that are not there, or shorter than it says."""
    needed: dict[str, int] = {}
    for place in (index.storage_data or {}).values():
        end = place.offset + place.length
        # A file holds the parts of many tensors, one after another.
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    for name, num_bytes in sorted(needed.items()):
        file = path / name
        if not file.exists():
            yield f"{file} is missing"
        elif file.stat().st_size < num_bytes:
            yield (
                f"{file} holds {file.stat().st_size:,} bytes, the index says {num_bytes:,}: it was "
                "cut short"
            )


def reason_of(error: BaseException) -> str:
    """Return the first line of what went wrong, on the first rank where it did."""
    first = first_failure(error)
    return (str(first).splitlines() or [type(first).__name__])[0]


def first_failure(error: BaseException) -> BaseException:
    """Return what the first rank raised, where torch tells of the failures of all."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)
