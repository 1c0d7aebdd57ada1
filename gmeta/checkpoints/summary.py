"""What a checkpoint holds, and whether all of it is there: from its index and the sizes of its
files, without reading a tensor unless checksums are asked for.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gmeta.checkpoints.about import read_about
from gmeta.checkpoints.files import damage_told, file_problems, intact_index
from gmeta.tables.names import module_name, table_of_weight

# How torchrec names what state_of gives to torch's checkpoints.
_TABLES = "model.tables."
_LAYERS = "model.learner."
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
    missing. `has_checksums` is False of what older releases wrote."""

    path: Path
    about: dict[str, Any]
    tables: tuple[TableSummary, ...]
    layers: tuple[LayerSummary, ...]
    disk_bytes: int
    problems: tuple[str, ...]
    has_checksums: bool


def summarise_checkpoint(path: Path, verify: bool = False) -> CheckpointSummary:
    """Read what a checkpoint folder says of itself; with `verify` hold all of it against its
    checksums."""
    about = read_about(path)
    with damage_told(path):
        return _summary(path, about, intact_index(path, about), verify)


def _summary(path: Path, about: dict[str, Any], index: Metadata, verify: bool) -> CheckpointSummary:
    tensors = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return CheckpointSummary(
        path=path,
        about=about,
        tables=tuple(_table(name, tensors) for name in sorted(tensors) if name.startswith(_TABLES)),
        layers=tuple(_layer(name, tensors) for name in sorted(tensors) if name.startswith(_LAYERS)),
        disk_bytes=sum(file.stat().st_size for file in path.iterdir()),
        problems=tuple(file_problems(path, about, index, contents=verify)),
        has_checksums="files" in about,
    )


def _table(name: str, tensors: dict[str, TensorStorageMetadata]) -> TableSummary:
    table = table_of_weight(name)
    num_rows, width = tensors[name].size
    # torchrec names state TABLE.weight.TABLE.STATE.
    prefix = f"{name.replace('model.', 'optimizer.state.', 1)}.{module_name(table)}."
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
