"""An increment of a stream says where it stands; a dataset that stands alone says nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import FormatError, Provenance, open_dataset, write_dataset
from metaio.format.dataset import Dataset, read_verified_file
from metaio.format.layout import MANIFEST_NAME, RESET_FOLDER
from metaio.format.manifest import StreamPlace, encode_manifest
from tests.metaio.conftest import FEATURES, make_rows

PLACE = StreamPlace("s", 7, "abc", (100, 200), {"item": 2})


def increment(path: Path, place: StreamPlace | None) -> Dataset:
    """The same few rows at this place of a stream, of whose table `item` two rows are reused."""
    with write_dataset(str(path), FEATURES, Provenance("user", "click")) as writer:
        writer.split("train").write(make_rows(3))
        writer.stream = place
        if place is not None:
            (writer.folder / RESET_FOLDER).mkdir()
            pq.write_table(pa.table({"row": [3, 5]}), writer.folder / RESET_FOLDER / "item.parquet")
    return open_dataset(str(path))


def test_an_increment_says_its_place_and_lists_its_resets(tmp_path: Path) -> None:
    dataset = increment(tmp_path / "data", PLACE)
    place = dataset.manifest.stream
    assert place is not None
    assert replace(place, resets={}) == PLACE
    assert place.resets.keys() == {"item"}
    read_verified_file(dataset, "reset/item.parquet", dict(dataset.files())["reset/item.parquet"])
    (tmp_path / "data" / "reset" / "item.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match="4 bytes that differ from the checksum in the manifest"):
        read_verified_file(dataset, "reset/item.parquet", place.resets["item"])


def test_the_fingerprint_follows_the_place(tmp_path: Path) -> None:
    places = [None, PLACE, *(replace(PLACE, **{k: v}) for k, v in CHANGES.items())]
    found = {increment(tmp_path / str(i), p).fingerprint for i, p in enumerate(places)}
    assert len(found) == len(places)


CHANGES = {"stream": "t", "increment": 8, "parent": "abd", "window": (100, 201)}


def test_a_dataset_that_stands_alone_has_no_such_key(tmp_path: Path) -> None:
    dataset = increment(tmp_path / "data", None)
    assert dataset.manifest.stream is None
    assert "stream" not in json.loads(dataset.read_file(MANIFEST_NAME))


def test_a_reset_file_of_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    manifest = increment(tmp_path / "data", PLACE).manifest
    assert manifest.stream is not None
    (entry,) = manifest.stream.resets.values()
    hostile = replace(manifest, stream=replace(manifest.stream, resets={"../x": entry}))
    (tmp_path / "data" / MANIFEST_NAME).write_bytes(encode_manifest(hostile))
    with pytest.raises(FormatError, match=r"stream\.resets has the name '\.\./x'; allowed are"):
        open_dataset(str(tmp_path / "data"))
