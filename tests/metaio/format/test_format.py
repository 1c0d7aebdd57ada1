"""What a reader refuses, with place and remedy; and where an increment of a stream stands."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import FormatError, MetaIOError, Provenance, open_dataset, write_dataset
from metaio.format.dataset import Dataset, read_verified_file
from metaio.format.decode import check_counts
from metaio.format.layout import (
    BLOCK_TABLE_NAME,
    MANIFEST_NAME,
    RESET_FOLDER,
    list_checksum_columns,
    list_streams,
)
from metaio.format.manifest import StreamPlace, canonical_json, encode_manifest, xxh3_hex
from tests.metaio.conftest import FEATURES, WriteFn, make_rows
from tests.metaio.damage import damage_and_read, whole_content

REMEDY = (
    "Copy the dataset again or prepare it again; gmeta inspect --verify lists every damaged file"
)


def message_of(path: str) -> str:
    with pytest.raises(MetaIOError) as caught:
        whole_content(open_dataset(path))
    return str(caught.value)


def test_any_parquet_tool_reads_every_file_without_nulls(write: WriteFn) -> None:
    rows = make_rows(30)
    path = write({"train": rows}, block_rows=50)
    lengths = {"rows": len(rows.label_N), "dense": rows.dense_NK.size, "episodes": 30}
    lengths |= {"positions": rows.ids_NF.size, "multi": len(rows.multi_ids_V)}
    for stream in list_streams(FEATURES):
        table = pq.read_table(f"{path}/{stream.path('train', 0)}")
        assert table.schema.equals(stream.schema)
        assert not any(field.nullable for field in table.schema)
        assert table.num_rows == lengths.get(stream.name, table.num_rows)


@pytest.mark.parametrize("compact", [True, False])
def test_both_encodings_hold_the_same_content(write: WriteFn, compact: bool) -> None:
    path = write({"train": make_rows(80)}, compact=compact, name="one")
    other = write({"train": make_rows(80)}, name="two", block_rows=65_536)
    assert whole_content(open_dataset(path)) == whole_content(open_dataset(other))
    assert open_dataset(path).fingerprint == open_dataset(other).fingerprint


def test_the_fingerprint_follows_the_content(write: WriteFn) -> None:
    prints = [
        open_dataset(write({"train": make_rows(9, seed)}, name=f"{name}")).fingerprint
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_folder_without_manifest_is_no_dataset(tmp_path: Path) -> None:
    assert message_of(f"{tmp_path}/no") == (
        f"{tmp_path}/no holds no dataset: manifest.json is missing. Give a folder that gmeta "
        "prepare made"
    )


def rewrite_manifest(path: str, **changes: object) -> None:
    manifest = Path(path) / "manifest.json"
    body = json.loads(manifest.read_text())
    body |= changes
    body.pop("checksum")
    body["checksum"] = xxh3_hex(canonical_json(body))
    manifest.write_text(json.dumps(body))


def test_another_version_is_refused_with_what_to_do(write: WriteFn) -> None:
    path = write({"train": make_rows(3)})
    rewrite_manifest(path, version=2)
    assert message_of(path) == (
        f"{path}/manifest.json has format version 2, this release reads version 1. Prepare the "
        "dataset again, or read it with the release that wrote it"
    )


def test_an_edited_manifest_is_refused(write: WriteFn) -> None:
    path = write({"train": make_rows(3)})
    manifest = Path(path) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"click"', '"clack"'))
    assert message_of(path) == (
        f"{path}/manifest.json does not match its own checksum: it was cut short or edited. "
        "manifest.json is written by prepare alone; copy the dataset again or prepare it again"
    )


def test_a_missing_shard_file_is_named(write: WriteFn) -> None:
    path = write({"train": make_rows(3)})
    os.remove(f"{path}/train/00000.dense.parquet")
    expected = f"{path}/train/00000.dense.parquet does not exist. Prepare the dataset again"
    assert message_of(path) == expected


def test_a_truncated_shard_file_is_named_with_both_sizes(write: WriteFn) -> None:
    path = write({"train": make_rows(3)})
    file = Path(path) / "train/00000.positions.parquet"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:100])
    assert message_of(path) == (
        f"{file} has 100 bytes, the manifest says {size}: it was cut short or rewritten. "
        "Copy the dataset again or prepare it again"
    )


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def test_a_flipped_bit_names_file_row_group_and_column(write: WriteFn) -> None:
    path = write({"train": make_rows(40)}, block_rows=60)
    file = Path(path) / "train/00000.rows.parquet"
    chunk = pq.read_metadata(file).row_group(1).column(2)
    flip(file, chunk.data_page_offset + chunk.total_compressed_size - 1)
    assert message_of(path) == (
        f"{file}, row group 1, column length_history: the bytes differ from the checksum in the "
        f"block table. {REMEDY}"
    )


def test_a_flipped_bit_in_a_footer_is_found(write: WriteFn) -> None:
    path = write({"train": make_rows(4)})
    file = Path(path) / "train/00000.unique.parquet"
    flip(file, file.stat().st_size - 30)
    expected = f"{file}: the footer differs from the checksum in the manifest. {REMEDY}"
    assert message_of(path) == expected


def test_a_flipped_bit_in_the_block_table_is_found(write: WriteFn) -> None:
    path = write({"train": make_rows(4)})
    file = Path(path) / "train/blocks.parquet"
    flip(file, 40)
    assert message_of(path) == f"{file} differs from the checksum in the manifest. {REMEDY}"


def test_a_block_table_of_another_writer_with_too_few_lists_is_refused(write: WriteFn) -> None:
    """Its checksum is right, so nothing but the lengths tells that blocks would be misread."""
    path = write({"train": make_rows(9)})
    file = Path(path) / "train" / BLOCK_TABLE_NAME
    table = pq.read_table(file)
    short = pa.array([[0]] * table.num_rows, table.schema.field("xxh3").type)
    place = table.schema.get_field_index("xxh3")
    pq.write_table(table.set_column(place, table.schema.field("xxh3"), short), file)
    splits = json.loads((Path(path) / "manifest.json").read_text())["splits"]
    entry = splits["train"]["block_table"]
    entry["xxh3"], entry["num_bytes"] = xxh3_hex(file.read_bytes()), file.stat().st_size
    rewrite_manifest(path, splits=splits)
    assert message_of(path) == (
        f"{file} must list 3 unique lengths and {len(list_checksum_columns(FEATURES))} checksums "
        "for each block. The program that wrote it is at fault; see docs/format.md"
    )


@pytest.mark.parametrize("bundle_tasks", [0, 4])
def test_positions_of_no_id_or_another_table_are_refused(write: WriteFn, bundle_tasks: int) -> None:
    """A foreign writer may give checksums of wrong content."""
    path = write({"train": make_rows(40)}, bundle_tasks=bundle_tasks)
    decoded = open_dataset(path).read_block("train", 0)
    beyond, counted_anew = decoded.positions_NF.copy(), decoded.positions_NF.copy()
    beyond[0, 0] = len(decoded.unique_ids_U)
    counted_anew[:, 1] -= int(decoded.unique_offsets_B1[2])  # as if those of each table began at 0
    for positions_NF in (beyond, counted_anew):
        with pytest.raises(FormatError) as caught:
            check_counts(
                "data, block 0", FEATURES, replace(decoded, positions_NF=positions_NF),
                decoded.num_episodes, decoded.num_rows, len(decoded.multi_positions_V),
            )  # fmt: skip
        assert str(caught.value) == (
            "data, block 0: column position contradicts the block table. The program that wrote it "
            "is at fault; docs/format.md says what belongs there"
        )


@pytest.mark.parametrize("bundle_tasks", [0, 4])
def test_random_damage_is_refused_or_read_correctly(write: WriteFn, bundle_tasks: int) -> None:
    """METAIO_FUZZ_TRIALS=10000 is the full run; see docs/format.md."""
    path = write({"train": make_rows(25)}, bundle_tasks=bundle_tasks, block_rows=60)
    trials = int(os.environ.get("METAIO_FUZZ_TRIALS", "300"))
    counts = damage_and_read(Path(path), trials, seed=trials)
    assert sum(counts.values()) == trials
    # Only the four bytes of Parquet's leading magic are read by nobody.
    assert counts["refused"] > 0.97 * trials


def test_a_page_that_does_not_decode_is_an_error_of_the_format(
    write: WriteFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a faulty writer gives right checksums of wrong pages, so checking is turned off here."""
    path = write({"train": make_rows(4)})
    file = Path(path) / "train/00000.dense.parquet"
    flip(file, pq.read_metadata(file).row_group(0).column(0).data_page_offset)
    monkeypatch.setattr("metaio.format.decode.RowGroup.check", lambda *_: None)
    assert message_of(path).startswith(f"{file}, row group 0 cannot be decoded: ")


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
