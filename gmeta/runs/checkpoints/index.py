"""The index of a checkpoint: its tensors, and where in which file they lie."""

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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from gmeta.config.table_names import TABLES_PREFIX
from gmeta.runs.checkpoints.table_records import FileSlice, copy_table
from metaio.format.names import is_name

# torch.distributed.checkpoint keeps it as a pickle, and a pickle from a stranger can run code. Here
# every class that it names becomes an inert record, and the index is built anew from these, each
# value checked. Items that are no tensors are refused: torch would unpickle them freely.
INDEX_FILE = ".metadata"
# Weights of tables, and what their optimizer keeps.
_OF_TABLES = f"model.{TABLES_PREFIX}", f"optimizer.state.{TABLES_PREFIX}"
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
    """The place of a tensor's bytes, as DCP's reader needs it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None  # no transforms were applied


class IndexedReader(FileSystemReader):
    """Reads the tensors of one checkpoint by its checked index."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.index = read_index(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checked index."""
        # torch's own method would unpickle the file.
        return self.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan: parts of tables row by row, which need not fit into memory
        twice."""
        rest = []
        for item in plan.items:
            if item.storage_index.fqn.startswith(_OF_TABLES):
                self._copy_table(item, planner)
            else:
                rest.append(item)
        return super().read_data(replace(plan, items=rest), planner)

    def _copy_table(self, item: ReadItem, planner: LoadPlanner) -> None:
        place = self.storage_data[item.storage_index]
        stored = self.index.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        begin = item.storage_index.offset or torch.Size([0] * len(stored.size))
        (shape,) = (chunk.sizes for chunk in stored.chunks if chunk.offsets == begin)
        target = planner.resolve_tensor(item).detach()
        with (Path(self.path) / place.relative_path).open("rb") as file:
            part = FileSlice(file, place.offset, place.length)
            copy_table(part, shape, item.storage_offsets, target)
        planner.commit_tensor(item, target)


def read_index(path: Path) -> Metadata:
    """Return the index of the checkpoint in the folder `path`. Raises integrity.DAMAGE: it cannot
    be read, names a class that no index has, or points outside the folder."""
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
    """Return an index that fits the nested state `wanted` where a tensor of one of these prefixes
    has more rows: torch loads the stored rows, and leaves the rest."""
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
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _iterate_sizes(value, f"{prefix}{key}.")
        elif hasattr(value, "size"):
            yield f"{prefix}{key}", value.size()


class _PickledRecord:
    """A pickled object: the arguments of its class, named by its own class, and its state."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Member(_PickledRecord):
    """Stands in for getattr, by which gmeta once wrote a member of the Enum on Python 3.11.2."""

    def __new__(cls, kind: Any, name: Any) -> Any:
        values = [member.value for member in _MemoryFormat if member.name == name]
        if isinstance(kind, type) and kind.__name__ == _MemoryFormat.__name__ and values:
            return kind(*values)
        raise pickle.UnpicklingError("its index names builtins.getattr, as none of ours does")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # No class of the file is imported: names become classes of records.
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
    # `type(...) is`, not isinstance: True is an int, too, and no count.
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
