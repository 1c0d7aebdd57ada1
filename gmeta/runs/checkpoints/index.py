"""The index of a checkpoint: which tensors there are, and where in which file they lie.

torch.distributed.checkpoint keeps it as a pickle, and a pickle from a stranger can run code. Here
every class that it names becomes an inert record, and the index is built anew from what the records
say, each value checked. Items that are no tensors are refused: torch would unpickle them freely."""

import copyreg
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
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
_DCP_MODULE = "torch.distributed.checkpoint"
_KNOWN_CLASSES = {
    (f"{_DCP_MODULE}.filesystem", "_StorageInfo"),
    (f"{_DCP_MODULE}.metadata", "BytesStorageMetadata"),
    (f"{_DCP_MODULE}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP_MODULE}.metadata", "Metadata"),
    (f"{_DCP_MODULE}.metadata", "MetadataIndex"),
    (f"{_DCP_MODULE}.metadata", "StorageMeta"),
    (f"{_DCP_MODULE}.metadata", "TensorProperties"),
    (f"{_DCP_MODULE}.metadata", "TensorStorageMetadata"),
    (f"{_DCP_MODULE}.metadata", "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
# The one Enum of an index, by its value on every Python: 3.11.2 would write getattr and its name.
_MemoryFormat: type[Enum] = type(TensorProperties().__getstate__()[3])
copyreg.pickle(_MemoryFormat, lambda member: (_MemoryFormat, (member.value,)))


@dataclass(frozen=True)
class TensorLocation:
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
    """Return the index of the checkpoint in the folder `path`.

    Raises:
        OSError, ValueError, pickle.UnpicklingError: it cannot be read, names what no checkpoint of
            ours holds, or points outside the folder; more where it is damaged, see files.DAMAGE."""
    with (path / INDEX_FILE).open("rb") as file:
        metadata = _decode_state(_Unpickler(file).load(), "Metadata")
    locations = {
        _decode_key(key): _decode_location(place) for key, place in metadata["storage_data"].items()
    }
    tensors = {
        _check_type(str, name): _decode_tensor(one)
        for name, one in metadata["state_dict_metadata"].items()
    }
    return Metadata(state_dict_metadata=dict(tensors), storage_data=locations)


def fit_grown_index(
    index: Metadata, wanted: Mapping[str, Any], prefixes: tuple[str, ...]
) -> Metadata:
    """Return an index that fits the nested state `wanted` also where a tensor of one of these
    prefixes has more rows there: torch loads the rows that are stored, and leaves the rest."""
    tensors = dict(index.state_dict_metadata)
    for name, size in _iterate_sizes(wanted):
        stored = tensors.get(name)
        if not (isinstance(stored, TensorStorageMetadata) and name.startswith(prefixes)):
            continue
        # Rows alone may grow: another width is another model.
        if size[1:] == stored.size[1:] and size[0] > stored.size[0]:
            tensors[name] = replace(stored, size=size)
    return replace(index, state_dict_metadata=tensors)


def _iterate_sizes(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Size]]:
    """Yield name and size of every tensor of a nested state, named as torch's checkpoints do."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _iterate_sizes(value, f"{prefix}{key}.")
        elif hasattr(value, "size"):
            yield f"{prefix}{key}", value.size()


class _PickledRecord:
    """What a pickle says of an object: its class's name, what it is called with, its state."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Member(_PickledRecord):
    """Stands in for getattr, by which gmeta once wrote a member of the Enum on Python 3.11.2."""

    def __new__(cls, kind: Any, name: Any) -> Any:
        """Return the record that its value makes; no other attribute is to be had."""
        values = [member.value for member in _MemoryFormat if member.name == name]
        if isinstance(kind, type) and kind.__name__ == _MemoryFormat.__name__ and values:
            return kind(*values)
        raise pickle.UnpicklingError("its index names builtins.getattr, as none of ours does")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a new class of records for the few classes of an index, a dtype for its name."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return type(name, (_Member,), {})
        if (module, name) not in _KNOWN_CLASSES:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, as none of ours does")
        return type(name, (_PickledRecord,), {})


def _decode_state(record: Any, kind: str) -> Any:
    if type(record).__name__ != kind or not isinstance(record, _PickledRecord):
        raise ValueError(f"its index holds a {type(record).__name__} where a {kind} belongs")
    return record.state


def _check_type(kind: type, value: Any) -> Any:
    negative = isinstance(value, int) and value < 0
    if type(value) is not kind or negative:
        raise ValueError(f"its index holds {value!r:.60} where {kind.__name__} belongs")
    return value


def _decode_key(record: Any) -> MetadataIndex:
    fields = _decode_state(record, "MetadataIndex")
    # A hint where to look first; without it torch looks through all.
    hint = None if fields["index"] is None else _check_type(int, fields["index"])
    return MetadataIndex(_check_type(str, fields["fqn"]), _decode_size(fields["offset"]), hint)


def _decode_location(record: Any) -> TensorLocation:
    fields = _decode_state(record, "_StorageInfo")
    if not is_name(fields["relative_path"]):
        raise ValueError(
            f"its index names the file {fields['relative_path']!r:.60}, of no checkpoint"
        )
    return TensorLocation(
        fields["relative_path"],
        _check_type(int, fields["offset"]),
        _check_type(int, fields["length"]),
    )


def _decode_tensor(record: Any) -> TensorStorageMetadata:
    fields = _decode_state(record, "TensorStorageMetadata")
    dtype = _decode_state(fields["properties"], "TensorProperties")[0]
    chunks = [_decode_state(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(_check_type(torch.dtype, dtype)),
        _decode_size(fields["size"]),
        [
            ChunkStorageMetadata(_decode_size(chunk["offsets"]), _decode_size(chunk["sizes"]))
            for chunk in chunks
        ],
    )


def _decode_size(record: Any) -> torch.Size:
    _decode_state(record, "Size")
    return torch.Size([_check_type(int, length) for length in record.args[0]])
