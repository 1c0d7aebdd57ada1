"""Deltas: a chain over its base is the full export, to the byte; a damaged one is named."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gmeta
from gmeta.errors import GMetaError
from gmeta.serving.channel import materialize as whole
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.model_version import Version, is_delta
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.exported_folder import NEIGHBOURS_FILE
from gmeta.serving.table_format import TableFormat
from tests.serving.channel.models import Model, content

SIZES = {"item": 9_000, "city": 40}


def deliver(channel: Channel, model: Model, folder: Path, form: TableFormat = "float32") -> Version:
    """Promote a model as `gmeta channel promote RUN` does; leave its full export at `folder`."""
    model.write(folder, form)
    copy, packed = folder.with_suffix(".copy"), folder.with_suffix(".packed")
    shutil.copytree(folder, copy)
    pack(channel, copy, packed, overwrite=False)
    return channel.version(channel.promote(packed).number)


@pytest.mark.parametrize("form", ["float32", "float16", "int8"])
@pytest.mark.parametrize("neighbours_of", ["", "item"])
def test_a_chain_over_its_base_is_the_full_export(
    tmp_path: Path, form: TableFormat, neighbours_of: str
) -> None:
    rng, channel = np.random.default_rng(7), Channel(tmp_path / "channel")
    model = replace(Model.of(SIZES), neighbours_of=neighbours_of)
    model.values = {"city": ["Rome", "Oslo", "Bonn"]}
    deliver(channel, model, tmp_path / "1", form)
    for number, grown in ((2, 0), (3, 30), (4, 0)):
        model = model.changed(rng, grown=grown)
        freed = {2: ["Rome", None, "Bonn"], 3: ["Rome", "Lima", "Bonn", "Kyiv"]}
        model.values = {"city": freed.get(number, [*model.values["city"], "Cork"])}
        version = deliver(channel, model, tmp_path / str(number), form)
        assert version.kind == "delta"
        assert version.delta is not None
        changed = version.delta.touched.get(NEIGHBOURS_FILE)
        assert (changed is not None) == bool(neighbours_of)
        assert changed is None or 0 < changed.rows < changed.num_rows / 10
    for number in (2, 3, 4):
        for cache in (None, tmp_path / "fresh"):  # left by the export, and made of the chain
            found = materialize_version(channel, number, cache)
            assert content(found) == content(tmp_path / str(number))
    shutil.rmtree(tmp_path / "fresh")
    made = materialize_version(channel, 4, tmp_path / "fresh")
    gmeta.load(made)  # checks every checksum


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_a_delta_holds_the_touched_rows_and_no_other(tmp_path: Path, form: TableFormat) -> None:
    channel, model = Channel(tmp_path / "channel"), Model.of({"item": 4_000, "still": 2_000})
    deliver(channel, model, tmp_path / "1", form)
    tables = {name: table.clone() for name, table in model.tables.items()}
    touched = np.random.default_rng(0).choice(4_000, 123, replace=False)
    tables["item"][touched] *= 3
    tables["item"][touched, 0] += 1  # int8 codes of a row that is only scaled are the same
    version = deliver(channel, Model(tables), tmp_path / "2", form)
    assert version.delta is not None
    assert version.delta.touched["item"].rows == 123
    assert version.delta.touched["still"].rows == 0
    assert not (version.folder / "table-00001.safetensors").exists()


def test_a_table_may_grow_and_shrink_along_a_chain(tmp_path: Path) -> None:
    rng, channel, model = np.random.default_rng(5), Channel(tmp_path / "channel"), Model.of(SIZES)
    for number, size in enumerate((9_000, 9_500, 9_100, 9_300), start=1):
        model = model.changed(rng, share=0.01, grown=500)
        model.tables = {name: table[:size] for name, table in model.tables.items()}
        deliver(channel, model, tmp_path / str(number))
    assert [channel.version(number).kind for number in (2, 3, 4)] == ["delta"] * 3
    for number in (3, 4):
        made = materialize_version(channel, number, tmp_path / f"fresh-{number}")
        assert content(made) == content(tmp_path / str(number))


def test_rows_that_differ_only_in_the_sign_of_zero_are_shipped(tmp_path: Path) -> None:
    channel, model = Channel(tmp_path / "channel"), Model({"item": torch.zeros(2_000, 4)})
    deliver(channel, model, tmp_path / "1")
    model.tables = {"item": torch.zeros(2_000, 4)}
    model.tables["item"][9] = -0.0
    version = deliver(channel, model, tmp_path / "2")
    assert version.delta is not None
    assert version.delta.touched["item"].rows == 1
    assert content(materialize_version(channel, 2, tmp_path / "own")) == content(tmp_path / "2")


@pytest.mark.parametrize("before", ["", "item"])
def test_a_version_whose_neighbours_are_others_is_full(tmp_path: Path, before: str) -> None:
    channel, model = Channel(tmp_path / "channel"), Model.of({"item": 3_000, "city": 9_000})
    first = replace(model, neighbours_of=before).write(tmp_path / "m1")
    pack(channel, first, tmp_path / "v1", overwrite=False)
    channel.promote(tmp_path / "v1")
    second = replace(model, neighbours_of="" if before else "item").write(tmp_path / "m2")
    whole = content(second)
    version, why = pack(channel, second, tmp_path / "v2", overwrite=False)
    assert (version.delta, why) == (None, "its neighbours are others")
    channel.promote(tmp_path / "v2")
    assert content(materialize_version(channel, 2)) == whole


def test_a_long_or_heavy_chain_becomes_a_full_version(tmp_path: Path) -> None:
    rng, channel, model = np.random.default_rng(1), Channel(tmp_path / "channel"), Model.of(SIZES)
    kinds, why = [], ""
    for number in range(6):
        packed = tmp_path / f"{number}.packed"
        made = model.write(tmp_path / str(number))
        _, why = pack(channel, made, packed, overwrite=False, max_chain=3)
        kinds += [channel.version(channel.promote(packed).number).kind]
        model = model.changed(rng, share=0.01)
    assert kinds == ["full", "delta", "delta", "delta", "full", "delta"]
    _, why = pack(channel, model.changed(rng, 0.9).write(tmp_path / "x"), tmp_path / "y", False)
    assert why == "the deltas over version 5 are half of it"
    assert not is_delta(tmp_path / "y")
    _, why = pack(channel, model.write(tmp_path / "z", "int8"), tmp_path / "i", False)
    assert why == "its rows are int8 of width 4, those served float32 of width 4"


def test_a_damaged_file_of_a_delta_is_named(tmp_path: Path) -> None:
    rng, channel, model = np.random.default_rng(1), Channel(tmp_path / "channel"), Model.of(SIZES)
    for number in (1, 2, 3):
        deliver(channel, model, tmp_path / str(number))
        model = model.changed(rng)
    table = channel.folder_of(2) / "table-00000.safetensors"
    intact = table.read_bytes()
    altered(channel.folder_of(2))
    told = re.escape(f"{table} differs from the checksum in delta.json")
    with pytest.raises(GMetaError, match=told):
        materialize_version(channel, 3, tmp_path / "own")
    assert list((tmp_path / "own").rglob("config.json")) == []
    table.write_bytes(intact)
    assert content(materialize_version(channel, 3, tmp_path / "own")) == content(tmp_path / "3")
    (channel.folder_of(2) / "delta.json").write_text("{}")
    with pytest.raises(GMetaError, match=r"delta\.json is no file of format gmeta-delta"):
        materialize_version(channel, 3, tmp_path / "other")


def cut(copy: Path) -> None:
    """As a copy that was killed leaves a file."""
    table = copy / "table-00000.safetensors"
    table.write_bytes(table.read_bytes()[:-16])


def altered(copy: Path) -> None:
    """As a power cut leaves a file that was never flushed: of its size, with other bytes."""
    table = copy / "table-00000.safetensors"
    intact = table.read_bytes()
    table.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))


def headless(copy: Path) -> None:
    """As a removal that was killed leaves a folder."""
    (copy / "config.json").unlink()


@pytest.mark.parametrize("damage", [cut, altered, headless])
def test_a_damaged_model_in_the_cache_is_made_anew(
    tmp_path: Path, cache: Path, damage: Callable[[Path], None]
) -> None:
    rng, channel, model = np.random.default_rng(5), Channel(tmp_path / "channel"), Model.of(SIZES)
    for number in (1, 2, 3):
        deliver(channel, model, tmp_path / str(number))
        model = model.changed(rng)
    copies = {number: materialize_version(channel, number) for number in (2, 3)}
    damage(copies[3])
    assert content(materialize_version(channel, 3)) == content(tmp_path / "3")
    # What is made from: the copy of the version before.
    shutil.rmtree(copies[3])
    damage(copies[2])
    assert content(materialize_version(channel, 3)) == content(tmp_path / "3")
    # A delta over a damaged copy would be one that no server can make whole.
    damage(copies[3])
    assert deliver(channel, model, tmp_path / "4").kind == "delta"
    assert content(materialize_version(channel, 4, tmp_path / "fresh")) == content(tmp_path / "4")
    found = {path.name for path in copies[3].parent.iterdir()}
    assert found == {".cache.lock", *(channel.version(number).checksum for number in (3, 4))}


class Killed(BaseException):
    """Ends a process as kill -9 does: nothing catches it."""


def test_a_copy_to_the_cache_that_is_killed_is_no_model_there(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, channel, model = np.random.default_rng(5), Channel(tmp_path / "channel"), Model.of(SIZES)
    deliver(channel, model, tmp_path / "1")
    model = model.changed(rng)
    made = model.write(tmp_path / "2")
    kept = []

    def other_disk(source: str, target: str) -> None:
        if len(kept) == 2:
            raise Killed
        kept.append(shutil.copyfile(source, target))

    with monkeypatch.context() as patched:
        patched.setattr(whole, "link_or_copy", other_disk)
        # What tidies up after an error does not run in a process that is killed.
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            pack(channel, shutil.copytree(made, tmp_path / "copy"), tmp_path / "packed", False)
    (own,) = cache.iterdir()
    assert [path.name[0] for path in own.iterdir()] == [".", "."]  # the lock, and what is left
    pack(channel, made, tmp_path / "packed", overwrite=True)
    channel.promote(tmp_path / "packed")
    copy = materialize_version(channel, 2)
    assert {path.name for path in own.iterdir()} == {".cache.lock", copy.name}
    shutil.rmtree(copy)
    assert content(materialize_version(channel, 2)) == content(made)
