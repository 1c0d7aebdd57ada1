"""A checkpoint from a stranger: its index is read without running what a pickle asks for."""

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from gmeta.errors import GMetaError
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.runs.checkpoints.index import read_index
from gmeta.serving.export import CheckpointReader
from tests.support.commands import SMALL_MODEL, gmeta
from tests.support.refusals import catch_message
from tests.support.sealed import replace_file

LAYER = "model.learner.model.top.0.bias"


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._mark,)


def unpickled(checkpoint: Path) -> Metadata:
    """The index as torch reads it."""
    return FileSystemReader(str(checkpoint)).read_metadata()


def test_the_index_is_what_torch_reads(checkpoint: Path) -> None:
    mine, torchs = read_index(checkpoint), unpickled(checkpoint)
    assert mine.state_dict_metadata == torchs.state_dict_metadata
    found = {key: asdict(place) for key, place in mine.storage_data.items()}
    assert found == {key: asdict(place) for key, place in torchs.storage_data.items()}
    # They compare equal whatever their hints.
    hints = [[key.index for key in index.storage_data] for index in (mine, torchs)]
    assert hints[0] == hints[1]


def instead(index: Metadata, mark: Path) -> object:
    return Hostile(mark)


def inside(index: Metadata, mark: Path) -> object:
    index.planner_data = {"model": Hostile(mark)}
    return index


def as_a_size(index: Metadata, mark: Path) -> object:
    index.state_dict_metadata[LAYER].size = Hostile(mark)  # type: ignore[union-attr, assignment]
    return index


def as_a_key(index: Metadata, mark: Path) -> object:
    index.storage_data = [(Hostile(mark), None)]
    return index


@pytest.mark.parametrize("hide", [instead, inside, as_a_size, as_a_key])
def test_a_pickle_in_the_index_is_not_run(
    checkpoint: Path, tmp_path: Path, hide: Callable[[Metadata, Path], object]
) -> None:
    mark = tmp_path / "ran"
    hostile = pickle.dumps(hide(unpickled(checkpoint), mark))
    replace_file(checkpoint, "progress.json", ".metadata", hostile)
    for read in (summarise_checkpoint, CheckpointReader):
        assert catch_message(GMetaError, read, checkpoint).startswith(
            f"checkpoint {checkpoint} cannot be read: its index names posix.mkdir, as none of "
            "ours does. "
        )
    assert not mark.exists()
    pickle.loads(hostile)
    assert mark.exists()  # so it would have run


def test_a_pickle_among_the_tensors_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    mark, index = tmp_path / "ran", unpickled(checkpoint)
    hostile = io.BytesIO()
    torch.save(Hostile(mark), hostile)
    (place,) = [place for key, place in index.storage_data.items() if key.fqn == LAYER]
    place.relative_path, place.offset, place.length = "extra", 0, len(hostile.getvalue())
    replace_file(checkpoint, "progress.json", "extra", hostile.getvalue())
    replace_file(checkpoint, "progress.json", ".metadata", pickle.dumps(index))
    with pytest.raises(GMetaError) as caught:
        CheckpointReader(checkpoint).read([LAYER])
    assert str(caught.value).startswith(f"checkpoint {checkpoint} cannot be read: Weights only ")
    # As an item that is no tensor torch would unpickle it freely.
    index.state_dict_metadata[LAYER] = BytesStorageMetadata()
    replace_file(checkpoint, "progress.json", ".metadata", pickle.dumps(index))
    found = "its index holds a BytesStorageMetadata where a TensorStorageMetadata belongs"
    assert found in catch_message(GMetaError, CheckpointReader, checkpoint)
    assert not mark.exists()


def test_an_index_that_points_outside_its_folder_is_refused(checkpoint: Path) -> None:
    index = unpickled(checkpoint)
    next(iter(index.storage_data.values())).relative_path = "../../config.json"
    replace_file(checkpoint, "progress.json", ".metadata", pickle.dumps(index))
    with pytest.raises(GMetaError) as caught:
        summarise_checkpoint(checkpoint)
    assert "its index names the file '../../config.json', of no checkpoint. " in str(caught.value)


def test_a_pickle_cannot_change_what_later_reads_are_made_of(checkpoint: Path) -> None:
    # The class itself is given a state, here to set an attribute of it.
    hostile = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x05stateNs\x86b."
    replace_file(checkpoint, "progress.json", ".metadata", hostile)
    with pytest.raises(GMetaError):
        summarise_checkpoint(checkpoint)
    pickle.loads(hostile)
    assert "state" in vars(Metadata)  # so it would have been changed
    del Metadata.state


class Attribute:
    """Pickles as the attribute of an object, as a member of an Enum does on Python 3.11.2."""

    def __init__(self, of: object, name: object) -> None:
        self._words = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._words


class PicklerBefore(pickle.Pickler):
    """Writes an index as gmeta did on Python 3.11.2."""

    def reducer_override(self, value: object) -> Any:
        is_member = isinstance(value, Enum)
        return (getattr, (type(value), value.name)) if is_member else NotImplemented


def test_an_index_that_python_3_11_2_wrote_is_read(checkpoint: Path) -> None:
    expected, content = read_index(checkpoint), io.BytesIO()
    PicklerBefore(content).dump(unpickled(checkpoint))
    assert b"getattr" in content.getvalue()
    (checkpoint / ".metadata").write_bytes(content.getvalue())
    assert read_index(checkpoint) == expected


MEMBER = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")


@pytest.mark.parametrize(
    "attribute",
    [
        Attribute(Metadata, "TORCH_CHANNELS_LAST"),
        Attribute("_MEM_FORMAT_ENCODING", "title"),
        *(Attribute(_MEM_FORMAT_ENCODING, name) for name in ("__class__", "mro", "_member_map_")),
        Attribute(_MEM_FORMAT_ENCODING, ["TORCH_CHANNELS_LAST"]),
        Attribute(MEMBER, "TORCH_CHANNELS_LAST"),
        Attribute(Attribute(_MEM_FORMAT_ENCODING, "__class__"), "mro"),
        Attribute(getattr, "__call__"),
    ],
)
def test_no_other_attribute_is_read(checkpoint: Path, attribute: Attribute) -> None:
    index = unpickled(checkpoint)
    index.planner_data = [MEMBER, attribute]
    replace_file(checkpoint, "progress.json", ".metadata", pickle.dumps(index))
    assert catch_message(GMetaError, summarise_checkpoint, checkpoint).startswith(
        f"checkpoint {checkpoint} cannot be read: its index names builtins.getattr, as none of "
        "ours does. "
    )


def test_an_index_is_the_same_on_pythons(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_python_3_11_2(member: Enum, protocol: int) -> Any:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(Enum, "__reduce_ex__", as_python_3_11_2)
    assert pickle.dumps(_MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST, protocol=4) == (
        b"\x80\x04\x95H\x00\x00\x00\x00\x00\x00\x00\x8c%torch.distributed.checkpoint.metadata\x94"
        b"\x8c\x14_MEM_FORMAT_ENCODING\x94\x93\x94K\x01\x85\x94R\x94."
    )
    assert b"getattr" not in (checkpoint / ".metadata").read_bytes()


COMMANDS = {
    "inspect RUN": ("inspect", "{run}"),
    "inspect CHECKPOINT": ("inspect", "{checkpoint}", "--verify"),
    "evaluate": ("evaluate", "{run}"),
    "export": ("export", "{run}", "{new}"),
    "resume": ("train", "{config}", "run.dir={run}", "--resume"),
    "start": ("train", "{config}", "run.dir={new}", "run.start_from={run}"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_no_command_runs_what_is_in_a_strangers_run(
    run: Path, checkpoint: Path, trained: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    mark = tmp_path / "ran"
    replace_file(checkpoint, "progress.json", ".metadata", pickle.dumps(Hostile(mark)))
    config = trained.parent / "train.toml"
    places = {"run": run, "checkpoint": checkpoint, "new": tmp_path / "new", "config": config}
    small = SMALL_MODEL if words[0] == "train" else []
    ended = gmeta(*(word.format(**places) for word in words), *small)
    assert ended.returncode == 1
    assert "its index names posix.mkdir, as none of ours does" in ended.stdout + ended.stderr
    assert not mark.exists()
