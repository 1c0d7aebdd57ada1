"""Columns of bundles that are looked at where the file has them, against what pyarrow decodes."""

import gc
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import BatchReader, Dataset, open_dataset
from metaio.format.decode import RowGroup
from metaio.format.layout import find_chunk_ranges, list_checksum_columns
from metaio.format.storage import ByteRange, ByteWindow, Storage
from metaio.read.compose import compose
from tests.metaio.conftest import FEATURES, WriteFn, episodes_of_rows, make_rows, whole_split

VALUES = np.arange(30_000, dtype=np.int32)
PLAIN: dict[str, Any] = {
    "compression": "none", "use_dictionary": False, "column_encoding": {"position": "PLAIN"},
    "data_page_size": 1 << 30, "max_rows_per_page": 1 << 30,
}  # fmt: skip
SCHEMA = pa.schema([pa.field("position", pa.int32(), nullable=False)])


@pytest.fixture(autouse=True)
def only_own_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no map that another test of this process left open."""
    monkeypatch.setattr("metaio.format.storage._open_maps", weakref.WeakSet())


def is_mapped(array: np.ndarray) -> bool:
    """Tell whether the memory of an array is a file's."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap)


def column(values: np.ndarray, schema: pa.Schema = SCHEMA) -> pa.Table:
    """A table of one column."""
    return pa.Table.from_arrays([pa.array(values, schema.types[0])], schema=schema)


def row_group(folder: Path, table: pa.Table, **options: Any) -> RowGroup:
    """The second row group of a file that is written so, which holds the table."""
    path = folder / "file.parquet"
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        writer.write_table(table.slice(0, 5), row_group_size=5)
        writer.write_table(table, row_group_size=len(table))
    metadata = pq.read_metadata(path)
    size = path.stat().st_size
    (window,) = Storage(str(folder)).read_windows([ByteRange(path.name, size, 0, size)])
    ranges = find_chunk_ranges(metadata, 1)
    return RowGroup(str(path), 1, metadata, window, ranges, range(len(ranges)))


@pytest.mark.parametrize("num_values", [1, 50, 8_191, 30_000])
def test_one_plain_page_is_not_copied(tmp_path: Path, num_values: int) -> None:
    group = row_group(tmp_path, column(VALUES[:num_values]), **PLAIN)
    (found,) = group.decode(in_place=True)
    assert is_mapped(found)
    assert not found.flags.writeable
    assert np.array_equal(found, VALUES[:num_values])
    (copied,) = group.decode()
    assert not is_mapped(copied)


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows_per_page": 20_000}, {"data_page_size": 1_024}, {"compression": "lz4"},
        {"column_encoding": {"position": "DELTA_BINARY_PACKED"}},
        {"column_encoding": {"position": "BYTE_STREAM_SPLIT"}},
        {"use_dictionary": True, "column_encoding": None}, {"data_page_version": "2.0"},
    ],
)  # fmt: skip
def test_whatever_else_a_writer_chose_is_decoded(tmp_path: Path, options: dict[str, Any]) -> None:
    (found,) = row_group(tmp_path, column(VALUES), **PLAIN | options).decode(in_place=True)
    assert not is_mapped(found)
    assert np.array_equal(found, VALUES)


def test_several_columns_are_looked_at_only_where_each_can_be(tmp_path: Path) -> None:
    table = pa.table(
        {"a": VALUES.astype(np.int64), "b": VALUES / np.float32(3)},
        schema=pa.schema(
            [pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.float32(), nullable=False)]
        ),
    )
    for encodings, mapped in (
        ({"a": "PLAIN", "b": "PLAIN"}, True),
        ({"a": "DELTA_BINARY_PACKED", "b": "PLAIN"}, False),
        ({"a": "PLAIN", "b": "BYTE_STREAM_SPLIT"}, False),
    ):
        group = row_group(tmp_path, table, **PLAIN | {"column_encoding": encodings})
        found = group.decode(in_place=True)
        assert [is_mapped(column) for column in found] == [mapped, mapped]
        assert all(map(np.array_equal, found, (table["a"].to_numpy(), table["b"].to_numpy())))


def test_a_column_that_may_hold_nulls_is_decoded(tmp_path: Path) -> None:
    schema = pa.schema([("position", pa.int32())])
    (found,) = row_group(tmp_path, column(VALUES, schema), **PLAIN).decode(in_place=True)
    assert not is_mapped(found)
    assert np.array_equal(found, VALUES)


def mapped_columns(dataset: Dataset) -> set[str]:
    block = dataset.read_block("train", 0)
    return {
        name for name, own in vars(block).items() if isinstance(own, np.ndarray) and is_mapped(own)
    }


def test_bundles_are_read_in_place_and_other_blocks_are_not(write: WriteFn) -> None:
    rows = make_rows(60)
    wanted = {
        "bundled": {"task_T", "label_N", "dense_NK", "positions_NF", "multi_positions_V"},
        "compact": set(),
        "plain": set(),
    }
    for name, mapped in wanted.items():
        bundle_tasks = 0 if name == "plain" else 4
        path = write(
            {"train": rows}, name=name, bundle_tasks=bundle_tasks, compact=name == "compact"
        )
        dataset = open_dataset(path)
        assert mapped_columns(dataset) == mapped
        # Whoever sees the block as another one, without bundles, may share its memory.
        assert mapped_columns(dataset.with_features(FEATURES, lambda block: block)) == set()
        assert whole_split(dataset, "train") == episodes_of_rows(rows)


def open_files(folder: str) -> int:
    """How many files below a folder this process has open, maps among them."""
    places = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(str(place.readlink()).startswith(folder) for place in places if place.exists())


@pytest.mark.parametrize("bundle_tasks", [0, 4])
def test_blocks_of_many_shards_hold_few_open_files(
    write: WriteFn, monkeypatch: pytest.MonkeyPatch, bundle_tasks: int
) -> None:
    shards = {"block_rows": 400, "shard_blocks": 1}
    path = write({"train": make_rows(2_500)}, bundle_tasks=bundle_tasks, **shards)
    dataset, limited = open_dataset(path), open_dataset(path)
    num_blocks, files = dataset.split("train").num_blocks, len(list(dataset.files()))
    assert num_blocks > 30
    wanted = [dataset.read_block("train", block) for block in range(num_blocks)]
    del dataset
    gc.collect()
    if not bundle_tasks:
        assert open_files(path) == 0  # pages that stay in memory hold no file
    monkeypatch.setattr("metaio.format.storage._MAX_MAPS", 8)
    monkeypatch.setattr("metaio.format.storage._MAX_MAPS_HELD", open_files(path) + 40)
    begin = open_files(path)
    found = [limited.read_block("train", block) for block in range(num_blocks)]
    # 40, the files of the block that went beyond it, and those that are kept to be used again.
    assert open_files(path) - begin < 40 + 8 + 8 < files / 2
    assert mapped_columns(limited) == set()
    for block, own in zip(found, wanted, strict=True):
        for name, array in vars(own).items():
            if isinstance(array, np.ndarray):
                assert np.array_equal(getattr(block, name), array)


def test_no_batch_is_a_view_of_a_file(write: WriteFn) -> None:
    """It may be given to other libraries, and outlives the dataset."""
    dataset = open_dataset(write({"train": make_rows(60)}, bundle_tasks=4, block_rows=100))
    block = dataset.read_block("train", 0)
    for episodes in (np.arange(block.num_episodes), np.arange(4), np.array([1, 2, 5])):
        for tensor in vars(compose(FEATURES, [(block, episodes)])).values():
            array = tensor.numpy()
            assert not any(
                np.shares_memory(array, own) for own in (block.dense_NK, block.positions_NF)
            )


def test_pages_are_let_go_of_with_the_last_array_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(ByteWindow, "release", lambda _, begin, end: done.append((begin, end)))
    group = row_group(tmp_path, column(VALUES), **PLAIN)
    (found,) = group.decode(in_place=True)
    rows = found.reshape(-1, 3)[5:]
    del found
    gc.collect()
    assert done == []
    assert rows[0].tolist() == [15, 16, 17]
    del rows
    gc.collect()
    assert done == group.ranges


def test_bundles_let_go_of_every_block(write: WriteFn, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(write({"train": make_rows(200)}, bundle_tasks=4, block_rows=100))
    read = dataset.split("train").num_blocks
    done: list[int] = []
    monkeypatch.setattr(ByteWindow, "release", lambda _, begin, end: done.append(end))
    with BatchReader(dataset, "train", tasks_per_step=8) as reader:
        assert sum(batch.num_tasks for batch in reader.batches(0)) == 200
    del reader
    gc.collect()
    # Each column is done with once a block is; ids are decoded, and their file is of one column.
    assert len(done) == len(list_checksum_columns(dataset.features)) * read
