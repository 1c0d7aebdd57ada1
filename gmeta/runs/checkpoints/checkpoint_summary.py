"""What a checkpoint holds, and whether all of it is there: from its index and the sizes of its
files, without reading a tensor unless checksums are asked for."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gmeta.config.table_names import module_name, table_of_weight
from gmeta.runs.checkpoints.integrity import find_file_problems, read_intact_index, translate_damage
from gmeta.runs.checkpoints.progress_file import read_about

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
    with translate_damage(path):
        return _summarise(path, about, read_intact_index(path, about), verify)


def _summarise(
    path: Path, about: dict[str, Any], index: Metadata, verify: bool
) -> CheckpointSummary:
    tensors = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return CheckpointSummary(
        path=path,
        about=about,
        tables=tuple(
            _summarise_table(name, tensors) for name in sorted(tensors) if name.startswith(_TABLES)
        ),
        layers=tuple(
            _summarise_layer(name, tensors) for name in sorted(tensors) if name.startswith(_LAYERS)
        ),
        disk_bytes=sum(file.stat().st_size for file in path.iterdir()),
        problems=tuple(find_file_problems(path, about, index, contents=verify)),
        has_checksums="files" in about,
    )


def _summarise_table(name: str, tensors: dict[str, TensorStorageMetadata]) -> TableSummary:
    table = table_of_weight(name)
    num_rows, width = tensors[name].size
    # torchrec names state TABLE.weight.TABLE.STATE.
    prefix = f"{name.replace('model.', 'optimizer.state.', 1)}.{module_name(table)}."
    return TableSummary(
        table,
        num_rows,
        width,
        _format_dtype(tensors[name]),
        _count_bytes(tensors[name]),
        {
            key.removeprefix(prefix): _count_bytes(entry)
            for key, entry in sorted(tensors.items())
            if key.startswith(prefix)
        },
    )


def _summarise_layer(name: str, tensors: dict[str, TensorStorageMetadata]) -> LayerSummary:
    layer = name.removeprefix(_LAYERS)
    prefix = f"{_LAYER_STATE}{layer}."
    return LayerSummary(
        layer,
        tuple(tensors[name].size),
        _format_dtype(tensors[name]),
        _count_bytes(tensors[name]),
        tuple(sorted(key.removeprefix(prefix) for key in tensors if key.startswith(prefix))),
    )


def _format_dtype(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


def _count_bytes(entry: TensorStorageMetadata) -> int:
    return int(prod(entry.size) * entry.properties.dtype.itemsize)
