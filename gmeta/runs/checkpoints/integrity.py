"""Whether a checkpoint's files, in torch's format, are as written: sums in progress.json."""

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
    choose_remedy,
    read_about,
    read_file_entries,
)

# Errors of a damaged checkpoint: pickle says that a wrong bit in its index may raise anything.
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
    """Turn the errors of a damaged checkpoint into one line."""
    try:
        yield
    except DAMAGE as error:
        check_exists(path)
        raise GMetaError(
            f"checkpoint {path} cannot be read: {describe_failure(error).rstrip('.')}. "
            f"{choose_remedy(first_failure(error), remedy)}"
        ) from error


def check_files(path: Path, part: int = 0, num_parts: int = 1, remedy: str = FALL_BACK) -> None:
    """Check one of `num_parts` parts of a checkpoint's files. Raises GMetaError: one is missing,
    cut short or altered; `remedy` says what to do."""
    about = read_about(path)
    with translate_damage(path, remedy):
        for problem in find_file_problems(
            path, about, read_intact_index(path, about), part, num_parts
        ):
            raise ValueError(problem)


def read_intact_index(path: Path, about: Mapping[str, Any]) -> Metadata:
    """Return a checkpoint's index, after its checksum."""
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
    """Yield a line for each file of a part that is not as written; without `contents` by size."""
    # Sorted: every rank cuts the same list into the same parts.
    files = dict(sorted(read_file_entries(about).items())[part::num_parts])
    if "files" in about:
        yield from find_differences(path, files, PROGRESS_FILE, contents=contents)
    else:
        yield from _find_missing_files(path, index)


def _find_missing_files(path: Path, index: Metadata) -> Iterator[str]:
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
    """Return the first line of the first rank's error."""
    first = first_failure(error)
    return (str(first).splitlines() or [type(first).__name__])[0]


def first_failure(error: BaseException) -> BaseException:
    """Return the first rank's error, where torch has those of all."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)
