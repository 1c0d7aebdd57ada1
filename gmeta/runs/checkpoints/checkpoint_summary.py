"""What a checkpoint holds, and if it is whole: by index and sizes, by tensors only to verify."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gmeta.config.table_names import module_name, table_of_weight
from gmeta.runs.checkpoints.integrity import find_file_problems, read_intact_index, translate_damage
from gmeta.runs.checkpoints.progress_file import read_about

# torch's names of the tensors in collect_state's dict.
_TABLES = "model.tables."
_LAYERS = "model.learner."
_LAYER_STATE = "optimizer.state.learner."


@dataclass(frozen=True)
class TableSummary:
    """One embedding table; `state_bytes` by the name of the optimizer's state."""

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
    """`about` is progress.json; `problems` is empty if all is there; old ones lack checksums."""

    path: Path
    about: dict[str, Any]
    tables: tuple[TableSummary, ...]
    layers: tuple[LayerSummary, ...]
    disk_bytes: int
    problems: tuple[str, ...]
    has_checksums: bool


def summarise_checkpoint(path: Path, verify: bool = False) -> CheckpointSummary:
    """Return the content of a checkpoint folder; with `verify` its checksums are checked."""
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
        # Older releases wrote none.
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
