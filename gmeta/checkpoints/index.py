"""The index of a checkpoint: which tensors there are, and where in which file they lie.

torch.distributed.checkpoint keeps it as a pickle, and a pickle from a stranger can run code. Here
every class that it names becomes an inert record, and the index is built anew from what the records
say, each value checked. Items that are no tensors are refused: torch would unpickle them freely.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from metaio.format.names import is_name

INDEX_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor lie: what DCP's reader asks of a class of its own."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None  # they are as they were


class IndexedReader(FileSystemReader):
    """Reads the tensors of one checkpoint by its checked index."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.index = read_index(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checked index; torch's own way would unpickle the file."""
        return self.index


def read_index(path: Path) -> Metadata:
    """Return the index of the checkpoint in the folder `path`."""
    with (path / INDEX_FILE).open("rb") as file:
        told = _state(_Unpickler(file).load(), "Metadata")
    places = {_key(key): _place(place) for key, place in told["storage_data"].items()}
    tensors = {_of(str, name): _tensor(one) for name, one in told["state_dict_metadata"].items()}
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def grown(index: Metadata, wanted: Mapping[str, Any], prefixes: tuple[str, ...]) -> Metadata:
    """Return an index that fits the nested state `wanted` also where a tensor of one of these
    prefixes has more rows there: torch loads the rows that are stored, and leaves the rest."""
    tensors = dict(index.state_dict_metadata)
    for name, size in _sizes(wanted):
        stored = tensors.get(name)
        if not (isinstance(stored, TensorStorageMetadata) and name.startswith(prefixes)):
            continue
        # Rows alone may grow: another width is another model.
        if size[1:] == stored.size[1:] and size[0] > stored.size[0]:
            tensors[name] = replace(stored, size=size)
    return replace(index, state_dict_metadata=tensors)


def _sizes(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Size]]:
    """Yield name and size of every tensor of a nested state, named as torch's checkpoints do."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, f"{prefix}{key}.")
        elif hasattr(value, "size"):
            yield f"{prefix}{key}", value.size()


class _Record:
    """What a pickle says of an object: its class's name, what it is called with, its state."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a new class of records for the few classes of an index, a dtype for its name."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, as none of ours does")
        return type(name, (_Record,), {})


def _state(record: Any, kind: str) -> Any:
    if type(record).__name__ != kind or not isinstance(record, _Record):
        raise ValueError(f"its index holds a {type(record).__name__} where a {kind} belongs")
    return record.state


def _of(kind: type, value: Any) -> Any:
    negative = isinstance(value, int) and value < 0
    if type(value) is not kind or negative:
        raise ValueError(f"its index holds {value!r:.60} where {kind.__name__} belongs")
    return value


def _key(record: Any) -> MetadataIndex:
    told = _state(record, "MetadataIndex")
    # A hint where to look first; without it torch looks through all.
    hint = None if told["index"] is None else _of(int, told["index"])
    return MetadataIndex(_of(str, told["fqn"]), _size(told["offset"]), hint)


def _place(record: Any) -> Place:
    told = _state(record, "_StorageInfo")
    if not is_name(told["relative_path"]):
        raise ValueError(
            f"its index names the file {told['relative_path']!r:.60}, of no checkpoint"
        )
    return Place(told["relative_path"], _of(int, told["offset"]), _of(int, told["length"]))


def _tensor(record: Any) -> TensorStorageMetadata:
    told = _state(record, "TensorStorageMetadata")
    dtype = _state(told["properties"], "TensorProperties")[0]
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in told["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(_of(torch.dtype, dtype)),
        _size(told["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _size(record: Any) -> torch.Size:
    _state(record, "Size")
    return torch.Size([_of(int, length) for length in record.args[0]])
