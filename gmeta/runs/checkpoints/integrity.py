"""The files of one checkpoint, and whether they are what was written.

torch.distributed.checkpoint's format, with progress.json beside it, which has their checksums."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from gmeta.errors import GMetaError
from gmeta.platform.files.checksums import find_differences
from gmeta.runs.checkpoints.index import INDEX_FILE, read_index
from gmeta.runs.checkpoints.progress_file import (
    FALL_BACK,
    PROGRESS_FILE,
    check_exists,
    read_about,
    read_file_entries,
)

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


@contextmanager
def translate_damage(path: Path, remedy: str = FALL_BACK) -> Iterator[None]:
    """Turn what reading a damaged checkpoint raises into one line."""
    try:
        yield
    except DAMAGE as error:
        check_exists(path)
        raise GMetaError(
            f"checkpoint {path} cannot be read: {describe_failure(error).rstrip('.')}. {remedy}"
        ) from error


def check_files(path: Path, part: int = 0, num_parts: int = 1, remedy: str = FALL_BACK) -> None:
    """Check one of `num_parts` parts of a checkpoint's files against their checksums. Raise
    GMetaError for one that is missing, cut short or altered; `remedy` says what to do."""
    about = read_about(path)
    with translate_damage(path, remedy):
        for problem in find_file_problems(
            path, about, read_intact_index(path, about), part, num_parts
        ):
            raise ValueError(problem)


def read_intact_index(path: Path, about: Mapping[str, Any]) -> Metadata:
    """Return a checkpoint's index, held against its checksum first."""
    index = {name: entry for name, entry in read_file_entries(about).items() if name == INDEX_FILE}
    # Checked first, so that the error says that bits are wrong, not what they came to mean.
    for difference in find_differences(path, index, PROGRESS_FILE, contents=True):
        raise ValueError(difference)
    return read_index(path)


def find_file_problems(
    path: Path,
    about: Mapping[str, Any],
    index: Metadata,
    part: int = 0,
    num_parts: int = 1,
    *,
    contents: bool = True,
) -> Iterator[str]:
    """Yield one line for each file, of one part of all, that is not what was written; without
    `contents` only what sizes tell, as for a checkpoint without checksums."""
    files = dict(sorted(read_file_entries(about).items())[part::num_parts])
    if "files" in about:
        yield from find_differences(path, files, PROGRESS_FILE, contents=contents)
    else:
        yield from _find_missing_files(path, index)


def _find_missing_files(path: Path, index: Metadata) -> Iterator[str]:
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


def describe_failure(error: BaseException) -> str:
    """Return the first line of what went wrong, on the first rank where it did."""
    first = first_failure(error)
    return (str(first).splitlines() or [type(first).__name__])[0]


def first_failure(error: BaseException) -> BaseException:
    """Return what the first rank raised, where torch tells of the failures of all."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)
