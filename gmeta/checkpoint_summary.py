"""What a checkpoint holds, and whether all of it is there: from its index and the sizes of its
files, without reading a tensor.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gmeta.checkpoint import DAMAGE, PROGRESS_FILE, read_progress
from gmeta.errors import GMetaError

# How torchrec names what state_of gives to torch's checkpoints.
_TABLES = "model.tables.embeddings."
_LAYERS = "model.learner."
_TABLE_STATE = "optimizer.state.tables.embeddings."
_LAYER_STATE = "optimizer.state.learner."


@dataclass(frozen=True)
class TableSummary:
    """One embedding table; `state_bytes` by the name of what its optimizer keeps."""

    name: str
    num_rows: int
    width: int
    dtype: str
    num_bytes: int
    state_bytes: dict[str, int]


@dataclass(frozen=True)
class LayerSummary:
    """One tensor of the layers, or of what learns with them (rates)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    state: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointSummary:
    """`about` is progress.json: step, epoch, and who wrote it; `problems` is empty if nothing is
    missing.
    """

    path: Path
    about: dict[str, Any]
    tables: tuple[TableSummary, ...]
    layers: tuple[LayerSummary, ...]
    disk_bytes: int
    problems: tuple[str, ...]


def summarise_checkpoint(path: Path) -> CheckpointSummary:
    """Read what a checkpoint folder says of itself.

    Raises:
        GMetaError: its index or progress.json is missing or broken: nothing of it can be loaded.
    """
    read_progress(path)
    try:
        return _summary(path, FileSystemReader(str(path)).read_metadata())
    except DAMAGE as error:
        raise GMetaError(
            f"checkpoint {path} cannot be read: {error}. Nothing of it can be loaded: remove it, "
            "then --resume goes on from the one before"
        ) from error


def _summary(path: Path, index: Metadata) -> CheckpointSummary:
    tensors = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return CheckpointSummary(
        path=path,
        about=json.loads((path / PROGRESS_FILE).read_text()),
        tables=tuple(_table(name, tensors) for name in sorted(tensors) if name.startswith(_TABLES)),
        layers=tuple(_layer(name, tensors) for name in sorted(tensors) if name.startswith(_LAYERS)),
        disk_bytes=sum(file.stat().st_size for file in path.iterdir()),
        problems=tuple(_missing(path, index)),
    )


def _table(name: str, tensors: dict[str, TensorStorageMetadata]) -> TableSummary:
    table = name.removeprefix(_TABLES).removesuffix(".weight")
    num_rows, width = tensors[name].size
    # torchrec names state TABLE.weight.TABLE.STATE.
    prefix = f"{_TABLE_STATE}{table}.weight.{table}."
    return TableSummary(
        table,
        num_rows,
        width,
        _dtype(tensors[name]),
        _bytes(tensors[name]),
        {
            key.removeprefix(prefix): _bytes(entry)
            for key, entry in sorted(tensors.items())
            if key.startswith(prefix)
        },
    )


def _layer(name: str, tensors: dict[str, TensorStorageMetadata]) -> LayerSummary:
    layer = name.removeprefix(_LAYERS)
    prefix = f"{_LAYER_STATE}{layer}."
    return LayerSummary(
        layer,
        tuple(tensors[name].size),
        _dtype(tensors[name]),
        _bytes(tensors[name]),
        tuple(sorted(key.removeprefix(prefix) for key in tensors if key.startswith(prefix))),
    )


def _dtype(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


def _bytes(entry: TensorStorageMetadata) -> int:
    return int(prod(entry.size) * entry.properties.dtype.itemsize)


def _missing(path: Path, index: Metadata) -> list[str]:
    """Files that the index names and that are not there, or shorter than it says."""
    needed: dict[str, int] = {}
    for place in (index.storage_data or {}).values():
        end = place.offset + place.length
        # A file holds the parts of many tensors, one after another.
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    problems = []
    for name, num_bytes in sorted(needed.items()):
        file = path / name
        if not file.exists():
            problems.append(f"{file} is missing")
        elif file.stat().st_size < num_bytes:
            problems.append(
                f"{file} holds {file.stat().st_size:,} bytes, the index says {num_bytes:,}: it was "
                "cut short"
            )
    return problems
