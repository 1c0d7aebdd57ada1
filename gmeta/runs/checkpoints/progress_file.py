"""progress.json: progress, model, algorithm and loss, and checksums of all files and its own."""

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gmeta.errors import DISK_FAILS, GMetaError
from gmeta.platform.files.checked_json import read_json
from gmeta.platform.files.checksums import FileChecksum, parse_entries
from gmeta.runs.checkpoints.lineage import read_lineage
from gmeta.runs.run_progress import RunProgress
from metaio.format.manifest import add_checksum, compute_checksum

PROGRESS_FILE = "progress.json"
TEMPORARY_PREFIX = "tmp-"  # of a folder that is being written
REPLACED_PREFIX = f"{TEMPORARY_PREFIX}replaced-"  # of one that a new one of its step replaces
FALL_BACK = "Remove it to fall back to the one before"


def read_progress(path: Path) -> RunProgress:
    """Return the progress of a checkpoint."""
    about = read_about(path)
    return RunProgress(**{item.name: about[item.name] for item in fields(RunProgress)})


def read_about(path: Path) -> dict[str, Any]:
    """Return a checkpoint's progress.json."""
    try:
        about = read_json(path / PROGRESS_FILE)
        checksum = about.pop("checksum", None)
        # Older releases wrote neither.
        if (checksum or "files" in about) and checksum != compute_checksum(about):
            raise ValueError("it does not match its own checksum")
        # No defaults: a missing step would be taken for the first.
        for item in fields(RunProgress):
            _check_number(item.name, about[item.name])
        _check_number("world_size", about.get("world_size", 1))
        if not isinstance(about.get("config", {}), dict):
            raise ValueError("its config is not an object")
        parse_entries(about.get("files", {}))
        read_lineage(about)
    except (OSError, ValueError, LookupError) as error:
        check_exists(path)
        raise GMetaError(
            f"checkpoint {path} cannot be loaded: its {PROGRESS_FILE} is missing or broken "
            f"({error!r}). {choose_remedy(error)}"
        ) from error
    return about


def choose_remedy(error: BaseException, remedy: str = FALL_BACK) -> str:
    """Return what to do about a checkpoint that cannot be read: `remedy`, if it is damaged."""
    # What a failing disk does not give may be sound: removing it would lose it.
    return DISK_FAILS if getattr(error, "errno", None) == errno.EIO else remedy


def check_exists(path: Path) -> None:
    """Raise GMetaError where a checkpoint is gone."""
    # A run that trains removes its older checkpoints.
    if not path.exists():
        raise GMetaError(
            f"checkpoint {path} is gone: a run that trains keeps the newest alone, as many as "
            "run.keep_last says. Give the command again, which takes a newer one"
        )


def _check_number(name: str, value: Any) -> None:
    if name == "best_score":
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{name} is {value!r:.60}, not a number")
    elif type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r:.60}, not a count")


def format_progress(
    progress: RunProgress, writer: Mapping[str, Any], files: Mapping[str, FileChecksum]
) -> str:
    """Return the text of progress.json, from the progress, the `writer` and the other files."""
    listed = {name: asdict(entry) for name, entry in files.items()}
    return json.dumps(add_checksum({**asdict(progress), **writer, "files": listed}))


def read_file_entries(about: Mapping[str, Any]) -> dict[str, FileChecksum]:
    """Return sizes and checksums of a checkpoint's other files; older releases wrote none."""
    return parse_entries(about.get("files", {}))


def restore_replaced(folder: Path) -> None:
    """Give a checkpoint its name back, if its writer was killed while replacing it."""
    # One process, before any lists the checkpoints.
    for put_aside in folder.glob(f"{REPLACED_PREFIX}*"):
        final = folder / put_aside.name.removeprefix(REPLACED_PREFIX)
        # Else the new one has its name, and this one goes with all that was left over.
        if not final.exists():
            put_aside.rename(final)
