"""What lies at a path that was given where something else is wanted."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

RUN_MARK = "config.json"
_TO_TRAIN = "gmeta train takes a config that names it as data.path, and gmeta init writes one"
# The file that marks a folder, what the folder is, and which command takes it; the first that is
# there counts.
_FOLDERS = {
    "study.json": "a study of gmeta tune: gmeta train takes {0}/best.toml; its runs are in "
    "{0}/trials, where the best trial's has checkpoints",
    "stream.json": f"a stream of datasets: {_TO_TRAIN}",
    "manifest.json": f"a prepared dataset: {_TO_TRAIN}",
    "current.json": "a channel: gmeta serve and gmeta inspect take it",
    "layers.safetensors": "an exported model: gmeta predict, adapt, score, serve and inspect take "
    "it",
    "progress.json": "a checkpoint: name the run folder that it is in",
    RUN_MARK: "a run folder: gmeta evaluate, export and inspect take it; to go on with it, give "
    "its config and --resume",
}
# The table that a TOML file of each kind has, and those of the others lack.
_TABLES = {
    "task": "a schema: gmeta prepare --schema {0} takes it, and gmeta train a config as gmeta init "
    "writes it",
    "run": "a training config: gmeta train takes it",
    "follow": "a config of gmeta follow, which takes it",
}


def describe_folder(path: Path, wanted: str = "") -> str:
    """Return what a folder is and which command takes it; "" if unknown or marked as `wanted`."""
    found = next((mark for mark in _FOLDERS if os.path.isfile(path / mark)), wanted)
    return "" if found == wanted else _FOLDERS[found].format(path)


def describe_toml(path: Path, tables: Mapping[str, object], wanted: str) -> str:
    """Return what a TOML file is that lacks the table `wanted`; "" if unknown or if it has it."""
    found = next((name for name in (wanted, *_TABLES) if name in tables), wanted)
    return "" if found == wanted else _TABLES[found].format(path)


def suggest_path(path: Path) -> str:
    """Return ". Did you mean ...?" where a path that is not there looks mistyped; else ""."""
    try:
        near = None if path.exists() else _find_similar(path)
    # A folder that may not be read: its names are nobody's to tell.
    except OSError:
        near = None
    return f". Did you mean {str(near)!r}?" if near is not None else ""


def _find_similar(path: Path) -> Path | None:
    # A folder's name, too, may be the one that was mistyped.
    above = path.parent if path.parent.is_dir() else _find_similar(path.parent)
    if above is None or not above.is_dir():
        return None
    names = difflib.get_close_matches(path.name, os.listdir(above), n=1, cutoff=0.7)
    return above / names[0] if names else None
