"""Files whose checksums fit and whose content makes no sense: refused in one line, or read."""

import copy
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from metaio import FormatError, MetaIOError, open_dataset
from metaio.format.decode import _encode_varint
from metaio.format.inspection import find_damage, summarise
from metaio.format.layout import (
    BLOCK_TABLE_NAME,
    find_chunk_ranges,
    list_streams,
    make_block_table_schema,
)
from metaio.format.manifest import canonical_json, xxh3_hex
from metaio.format.shard_writer import make_file_entry
from tests.metaio.conftest import FEATURES, WriteFn, make_rows
from tests.metaio.damage import whole_content

NUM_CHANGES = 200
# What a stranger may write where a number, a text, a list or an object belongs.
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**40, 2**63, 2**64, 10**30, 0.5, float("nan"), 1e308),
    *("", "x", "../../evil", "\ud800", "\x00", "train", [], [[]], {}, {"": {}}, [1, "a"]),
]
NUMBERS = [-(2**31), -1, 0, 1, 2, 7, 2**20, 2**31 - 1]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with every key or index in it."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def changed_json(rng: random.Random, body: dict[str, Any]) -> None:
    own, key = rng.choice([p for p in places(body) if p[1] not in ("format", "version")])
    way = rng.randrange(4)
    if way == 0:
        del own[key]
    elif way == 1 and isinstance(own, dict):
        own[rng.choice([f"{key}x", "../../evil", ""])] = own[key]
    else:
        own[key] = copy.deepcopy(rng.choice(VALUES))


def changed_table(rng: random.Random, table: pa.Table) -> pa.Table:
    """Other numbers, rows, columns or types."""
    index = rng.randrange(table.num_columns)
    name, column = table.column_names[index], table.column(index)
    way = rng.randrange(7)
    if way == 0:
        return table.drop_columns(name)
    if way == 1:
        return table.slice(0, rng.randrange(table.num_rows + 1))
    if way == 2:
        return pa.concat_tables([table, table])
    if way == 3:
        other: pa.Array = pa.array(["x"] * table.num_rows)
    elif way == 4:
        other = pa.nulls(table.num_rows, column.type)
    elif pa.types.is_list(column.type):
        lists = column.to_pylist()
        rng.choice(lists)[-1:] = rng.choices(NUMBERS, k=rng.randrange(3))
        other = pa.array(lists, column.type)
    else:
        numbers = column.to_pylist()
        for _ in range(rng.randrange(1, 4)):
            number = rng.choice(NUMBERS)
            whole = pa.types.is_integer(column.type)
            numbers[rng.randrange(len(numbers))] = number if whole else number / 2
        other = pa.array(numbers, column.type)
    return table.set_column(index, pa.field(name, other.type), other)


def change_shard(rng: random.Random, path: Path, body: dict[str, Any]) -> None:
    """Write another content of one stream, with checksums that fit it."""
    own = list_streams(FEATURES)
    stream = rng.choice(own)
    file = path / stream.path("train", 0)
    groups = pq.ParquetFile(file)
    tables = [groups.read_row_group(index) for index in range(groups.num_row_groups)]
    tables[0] = changed_table(rng, tables[0])
    with pq.ParquetWriter(file, tables[0].schema) as writer:
        for table in tables:
            if table.schema == tables[0].schema:
                writer.write_table(table, row_group_size=max(table.num_rows, 1))
    data, metadata = file.read_bytes(), pq.read_metadata(file)
    body["splits"]["train"]["shards"][0]["files"][stream.name] = vars(
        make_file_entry(memoryview(data))
    )
    blocks = pq.read_table(path / "train" / BLOCK_TABLE_NAME)
    lists = blocks["xxh3"].to_pylist()
    first = sum(len(before.schema.names) for before in own[: own.index(stream)])
    for index in range(min(metadata.num_row_groups, len(lists))):
        for column, (begin, end) in enumerate(find_chunk_ranges(metadata, index), start=first):
            digest = np.uint64(xxhash.xxh3_64_intdigest(data[begin:end]))
            lists[index][min(column, len(lists[index]) - 1)] = int(digest.view(np.int64))
    field = make_block_table_schema().field("xxh3")
    place = blocks.schema.get_field_index("xxh3")
    write_block_table(path, body, blocks.set_column(place, field, pa.array(lists, field.type)))


def write_block_table(path: Path, body: dict[str, Any], table: pa.Table) -> None:
    file = path / "train" / BLOCK_TABLE_NAME
    pq.write_table(table, file, store_schema=False)
    entry = vars(make_file_entry(memoryview(file.read_bytes())))
    body["splits"]["train"]["block_table"] = entry


def change(rng: random.Random, path: Path) -> None:
    """Change one thing of a dataset, and make every checksum fit it."""
    body = json.loads((path / "manifest.json").read_text())
    what = rng.choice(["manifest", "block table", "shard"])
    if what == "manifest":
        changed_json(rng, body)
    elif what == "shard":
        change_shard(rng, path, body)
    else:
        table = pq.read_table(path / "train" / BLOCK_TABLE_NAME)
        write_block_table(path, body, changed_table(rng, table))
    write_manifest(path, body)


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    body.pop("checksum", None)
    body["checksum"] = xxh3_hex(canonical_json(body))
    (path / "manifest.json").write_text(json.dumps(body))


def read_all(path: Path) -> None:
    """Open, verify, read and count; the first fault ends it."""
    dataset = open_dataset(str(path))
    for message in find_damage(dataset):
        raise MetaIOError(message)
    whole_content(dataset)
    summarise(dataset)


@pytest.mark.parametrize("bundle_tasks", [0, 4])
def test_files_whose_checksums_fit_a_wrong_content_are_refused_in_one_line(
    write: WriteFn, bundle_tasks: int
) -> None:
    splits = {"train": make_rows(12), "valid": make_rows(3, seed=1)}
    path = Path(write(splits, bundle_tasks=bundle_tasks, block_rows=30))
    rng, messages = random.Random(19), []
    for _ in range(NUM_CHANGES):
        copied = path.with_name("copy")
        shutil.copytree(path, copied)
        change(rng, copied)
        try:
            read_all(copied)
        except MetaIOError as error:
            messages.append(str(error))
        shutil.rmtree(copied)
    for message in messages:
        assert message.startswith(str(path.with_name("copy")))
        assert message.isprintable()
        assert len(message) < 1_000
    # Other labels, tasks and recipes are as good as the first ones.
    assert 0.7 * NUM_CHANGES < len(messages) < NUM_CHANGES


def negative(footer: bytes, num_values: int) -> bytes:
    """The footer with a column chunk that holds less than no values."""
    # Zigzag: the lowest bit of the first byte is the sign.
    number = b"\x16" + _encode_varint(num_values) + b"\x16"
    return footer.replace(number, bytes([0x16, number[1] | 1]) + number[2:], 1)


def overlapping(footer: bytes, num_bytes: int) -> bytes:
    """The footer with a column chunk that reaches into the next one."""
    size = b"\x16" + _encode_varint(num_bytes) + b"\x26"
    return footer.replace(size, b"\x16" + _encode_varint(num_bytes + 9) + b"\x26", 1)


@pytest.mark.parametrize("bundle_tasks", [0, 4])
@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        ("unique", lambda footer, _: footer.replace(b"\x02id", b"\x02i\xff"), "the footer cannot"),
        (
            "positions",
            lambda footer, chunk: negative(footer, chunk.num_values),
            "block 0: |row group 0",
        ),
        (
            "episodes",
            lambda footer, chunk: overlapping(footer, chunk.total_compressed_size),
            "a column chunk lies outside of the file's",
        ),
    ],
)
def test_a_footer_of_nonsense_is_refused_in_one_line(
    write: WriteFn, bundle_tasks: int, name: str, how: Any, told: str
) -> None:
    path = Path(write({"train": make_rows(40)}, bundle_tasks=bundle_tasks))
    file = path / "train" / f"00000.{name}.parquet"
    body = json.loads((path / "manifest.json").read_text())
    files = body["splits"]["train"]["shards"][0]["files"]
    data, begin = file.read_bytes(), -files[name]["footer_bytes"]
    footer = how(data[begin:], pq.read_metadata(file).row_group(0).column(0))
    assert footer != data[begin:]
    file.write_bytes(data[:begin] + footer)
    files[name] = vars(make_file_entry(memoryview(file.read_bytes())))
    write_manifest(path, body)
    with pytest.raises(FormatError) as caught:
        open_dataset(str(path)).read_block("train", 0)
    assert str(caught.value).startswith(str(path))
    assert re.search(told, str(caught.value))  # releases of pyarrow meet it at other places
    assert str(caught.value).isprintable()
