"""The files of one checkpoint, and whether they are what was written.

torch.distributed.checkpoint's format, with progress.json beside it, which has their checksums.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from gmeta.checkpoints.about import FALL_BACK, PROGRESS_FILE, check_there, files_of, read_about
from gmeta.checkpoints.index import INDEX_FILE, read_index
from gmeta.errors import GMetaError
from gmeta.files.checksums import differences

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
def damage_told(path: Path, remedy: str = FALL_BACK) -> Iterator[None]:
    """Turn what reading a damaged checkpoint raises into one line."""
    try:
        yield
    except DAMAGE as error:
        check_there(path)
        raise GMetaError(
            f"checkpoint {path} cannot be read: {reason_of(error).rstrip('.')}. {remedy}"
        ) from error


def check_files(path: Path, part: int = 0, num_parts: int = 1, remedy: str = FALL_BACK) -> None:
    """Check one of `num_parts` parts of a checkpoint's files against their checksums. Raise
    GMetaError for one that is missing, cut short or altered; `remedy` says what to do."""
    about = read_about(path)
    with damage_told(path, remedy):
        for problem in file_problems(path, about, intact_index(path, about), part, num_parts):
            raise ValueError(problem)


def intact_index(path: Path, about: Mapping[str, Any]) -> Metadata:
    """Return a checkpoint's index, held against its checksum first."""
    index = {name: entry for name, entry in files_of(about).items() if name == INDEX_FILE}
    # Checked first, so that the error says that bits are wrong, not what they came to mean.
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
    `contents` only what sizes tell, as for a checkpoint without checksums."""
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
