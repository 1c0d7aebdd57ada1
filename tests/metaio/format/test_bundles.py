"""Bundles against loops over the rows that were written; files that contradict themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import FormatError, open_dataset
from metaio.format.block import Block, build_block, bundle_ids
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.format.inspection import find_damage, summarise
from metaio.format.layout import BLOCK_TABLE_NAME, make_block_table_schema
from metaio.format.manifest import canonical_json, xxh3_hex
from metaio.format.shard_writer import make_file_entry
from tests.metaio.conftest import FEATURES, WriteFn, episodes_of_rows, make_rows, whole_split
from tests.support.refusals import catch_message

IDS_ALONE = Features(
    tables=(TableSpec("item", 50), TableSpec("unused", 9)),
    single=(FeatureSpec("item", "item"),),
    multi=(),
    dense=(),
)
LISTS_ALONE = Features(
    tables=(TableSpec("tag", 50),), single=(), multi=(FeatureSpec("tags", "tag"),), dense=()
)


def ids_by_table(features: Features, block: Block, first: int, stop: int) -> list[set[int]]:
    """Of each table the ids that episodes [first, stop) hold, row by row."""
    names = [table.name for table in features.tables]
    found: list[set[int]] = [set() for _ in names]
    value = int(block.value_offsets_T1[first])
    for row in range(int(block.row_offsets_T1[first]), int(block.row_offsets_T1[stop])):
        for feature, position in zip(features.single, block.positions_NF[row], strict=True):
            found[names.index(feature.table)].add(int(block.unique_ids_U[position]))
        for feature, count in zip(features.multi, block.multi_lengths_NM[row], strict=True):
            for position in block.multi_positions_V[value : value + count]:
                found[names.index(feature.table)].add(int(block.unique_ids_U[position]))
            value += int(count)
    return found


@pytest.mark.parametrize("features", [FEATURES, IDS_ALONE, LISTS_ALONE])
@pytest.mark.parametrize("num_tasks", [1, 4, 7, 100])
def test_a_bundle_has_the_ids_of_its_episodes_alone(features: Features, num_tasks: int) -> None:
    plain = build_block(features, make_rows(23, features=features))
    block = bundle_ids(plain, num_tasks)
    assert block.bundles is not None
    assert np.array_equal(
        block.unique_ids_U[block.positions_NF], plain.unique_ids_U[plain.positions_NF]
    )
    assert np.array_equal(
        block.unique_ids_U[block.multi_positions_V], plain.unique_ids_U[plain.multi_positions_V]
    )
    bundle_starts, bundle_lengths = block.bundles.bundle_starts, block.bundles.bundle_lengths
    assert len(bundle_starts) == len(bundle_lengths) == -(-23 // num_tasks)
    used = np.zeros(len(block.unique_ids_U), dtype=int)
    for index, (starts, lengths) in enumerate(zip(bundle_starts, bundle_lengths, strict=True)):
        first, stop = index * num_tasks, min((index + 1) * num_tasks, 23)
        wanted = ids_by_table(features, plain, first, stop)
        for table, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = slice(int(start), int(start + length))
            assert block.unique_ids_U[own].tolist() == sorted(wanted[table])
            # Within the stretch of its table.
            assert block.unique_offsets_B1[table] <= own.start
            assert own.stop <= block.unique_offsets_B1[table + 1]
            used[own] += 1
    assert (used == 1).all()


def test_blocks_end_where_bundles_do(write: WriteFn) -> None:
    rows = make_rows(150)
    path = write({"train": rows}, bundle_tasks=4, block_rows=100, shard_blocks=3)
    dataset = open_dataset(path)
    assert find_damage(dataset) == []
    assert whole_split(dataset, "train") == episodes_of_rows(rows)
    blocks = dataset.split("train").blocks
    assert blocks.bundle_tasks == 4
    assert len(blocks.num_episodes_Z) > 6
    assert (blocks.num_episodes_Z[:-1] % 4 == 0).all()
    for block in range(len(blocks.num_episodes_Z)):
        read = dataset.read_block("train", block)
        assert read.bundles is not None
        assert read.bundles.bundle_lengths.sum() == len(read.unique_ids_U)


def test_an_episode_longer_than_a_block_stands_in_a_bundle_all_the_same(write: WriteFn) -> None:
    path = write({"train": make_rows(20)}, bundle_tasks=3, block_rows=2)
    assert open_dataset(path).split("train").blocks.num_episodes_Z.tolist() == [3] * 6 + [2]


def test_ids_are_counted_as_without_bundles(write: WriteFn) -> None:
    counts = []
    for name, bundle_tasks in (("plain", 0), ("bundled", 5)):
        path = write({"train": make_rows(60)}, name=name, bundle_tasks=bundle_tasks)
        (summary,) = summarise(open_dataset(path))
        counts.append([table.uses_R.tolist() for table in summary.tables])
    assert counts[0] == counts[1]


def change_block_table(path: Path, change: Any) -> None:
    """Put another block table in its place; every checksum fits it."""
    file = path / "train" / BLOCK_TABLE_NAME
    pq.write_table(change(pq.read_table(file)), file, store_schema=False)
    body = json.loads((path / "manifest.json").read_text())
    entry = vars(make_file_entry(memoryview(file.read_bytes())))
    body["splits"]["train"]["block_table"] = entry
    body.pop("checksum")
    body["checksum"] = xxh3_hex(canonical_json(body))
    (path / "manifest.json").write_text(json.dumps(body))


def test_whoever_knows_no_bundles_reads_the_same_rows(write: WriteFn) -> None:
    """As the release before them does, which reads these columns of the block table alone."""
    rows = make_rows(60)
    path = Path(write({"train": rows}, bundle_tasks=4, block_rows=100))
    file = path / "train" / BLOCK_TABLE_NAME
    known = pq.read_table(file, schema=make_block_table_schema())
    assert known.column_names == make_block_table_schema().names
    change_block_table(path, lambda table: table.select(known.column_names))
    dataset = open_dataset(str(path))
    assert dataset.split("train").blocks.bundle_tasks == 0
    assert find_damage(dataset) == []
    assert whole_split(dataset, "train") == episodes_of_rows(rows)


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(name), pa.array(values, table[name].type))


def test_a_block_table_that_contradicts_itself_is_refused(write: WriteFn) -> None:
    path = Path(write({"train": make_rows(60)}, bundle_tasks=4, block_rows=100))
    original = (path / "train" / BLOCK_TABLE_NAME).read_bytes()
    table = pq.read_table(pa.BufferReader(original))
    lengths = table["bundle_unique_lengths"].to_pylist()
    moved = [[lengths[0][0] + 1, *lengths[0][1:]], *lengths[1:]]
    short = [lengths[0][:-1], *lengths[1:]]
    negative = [[-1, *lengths[0][1:3], lengths[0][0] + lengths[0][3] + 1, *lengths[0][4:]]]
    about = f"{path}/train/blocks.parquet: column"
    remedy = "The program that wrote it is at fault; docs/format.md says what belongs there"
    wrong = f"{about} bundle_unique_lengths contradicts unique_lengths"
    for column, values, message in (
        ("bundle_unique_lengths", moved, wrong),
        ("bundle_unique_lengths", short, wrong),
        ("bundle_unique_lengths", [*negative, *lengths[1:]], wrong),
        (
            "bundle_tasks",
            [5, *[4] * (table.num_rows - 1)],
            f"{about} bundle_tasks must hold one number from 1 on, it holds 4 to 5",
        ),
    ):
        changed = with_column(table, column, values)
        change_block_table(path, lambda _, changed=changed: changed)
        refusal = catch_message(FormatError, open_dataset, str(path))
        assert refusal.startswith(message)
        assert remedy.split(";", maxsplit=1)[0] in refusal


def test_positions_of_another_bundle_are_refused(write: WriteFn) -> None:
    """They would be moved with the ids of the wrong one."""
    path = Path(write({"train": make_rows(60)}, bundle_tasks=4, block_rows=100))
    blocks = pq.read_table(path / "train" / BLOCK_TABLE_NAME)
    lengths = blocks["bundle_unique_lengths"].to_pylist()
    # One id of the first table more in the first bundle, one less in the second.
    lengths[0][0] += 1
    lengths[0][3] -= 1
    change_block_table(path, lambda table: with_column(table, "bundle_unique_lengths", lengths))
    assert catch_message(FormatError, open_dataset(str(path)).read_block, "train", 0) == (
        f"{path}, split train, block 0: column position contradicts the block table. The program "
        "that wrote it is at fault; docs/format.md says what belongs there"
    )
