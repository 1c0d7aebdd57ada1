"""The on-disk format, version 1: files, columns, Arrow types, encodings; docs/format.md in code.

Shape suffixes: T tasks, N rows, V values, U unique ids"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

    from metaio.format.features import Features

FORMAT_NAME = "gmeta-metaio"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
BLOCK_TABLE_NAME = "blocks.parquet"
VOCABULARY_FOLDER = "vocabulary"
RESET_FOLDER = "reset"  # of an increment of a stream: rows that mean another value from it on
# No split can have this name: it has a character that those do without.
RAW_IDS_FOLDER = "raw_ids"

# One row group holds complete episodes up to this many rows: larger groups decode no faster
# (measured 14.8 million rows/s at 65,536; 45 instead of 36 ns a row at 6,400), smaller ones shuffle
# at a finer grain.
DEFAULT_BLOCK_ROWS = 65_536
# A shard is what one prepare task writes and one download fetches: 16 blocks are about 100 to 200
# MB.
DEFAULT_SHARD_BLOCKS = 16
# All episodes of a smaller train split are composed in half a second: they can be drawn one by one,
# and there would be few bundles to shuffle.
BUNDLED_ROWS = 8 * DEFAULT_BLOCK_ROWS
# Half of a usual step: fewer ids are looked up than where its episodes come from eight blocks.
BUNDLE_TASKS = 64


def usual_bundle_tasks(num_rows: int) -> int:
    """Return the episodes of a bundle in a train split of `num_rows` rows; 0: no bundles."""
    return BUNDLE_TASKS if num_rows >= BUNDLED_ROWS else 0


@dataclass(frozen=True)
class ShardStream:
    """One Parquet file of a shard; its columns have one length within a block."""

    name: str
    schema: pa.Schema

    def path(self, split: str, shard: int) -> str:
        """Return the path of this stream's file, relative to the dataset."""
        return f"{split}/{shard:05d}.{self.name}.parquet"


def _make_schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    # Without definition levels a column decodes by memcpy: 16 instead of 22 ns a row for 13 floats.
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


def list_streams(features: Features) -> tuple[ShardStream, ...]:
    """Return the files of every shard, but for those that would always be empty."""
    # Lengths of the streams: episodes [T], rows and row_ids [N], dense [N * K], positions [N * F],
    # multi [V], unique [U], events [E * numbers].
    counts = [(name, pa.int32()) for name in ("num_rows", "num_support", "num_values")]
    names = [f"label_{name}" for name in features.labels] or ["label"]
    labels = [(name, pa.float32()) for name in names + ["weight"] * bool(features.weight)]
    lengths = [("events_before", pa.int32())] * bool(features.events)
    lengths += [(f"length_{feature.name}", pa.int32()) for feature in features.lists]
    found = [
        ShardStream("episodes", _make_schema(("task", pa.int64()), *counts)),
        ShardStream("rows", _make_schema(*labels, *lengths)),
        ShardStream("dense", _make_schema(("value", pa.float32()))),
        ShardStream("positions", _make_schema(("position", pa.int32()))),
        ShardStream("multi", _make_schema(("position", pa.int32()))),
        ShardStream("unique", _make_schema(("id", pa.int64()))),
        ShardStream("row_ids", _make_schema(("row_id", pa.int64()))),
        ShardStream("events", _make_schema(("value", pa.float32()))),
    ]
    absent = {"dense": not features.dense, "positions": not features.single}
    absent |= {"multi": not features.lists, "unique": not features.sparse}
    absent |= {"row_ids": not features.row_id, "events": not features.events}
    return tuple(stream for stream in found if not absent.get(stream.name, False))


def list_checksum_columns(features: Features) -> tuple[tuple[str, str], ...]:
    """Return (stream, column) of each entry of a block's `xxh3` list, in that order."""
    return tuple(
        (stream.name, name) for stream in list_streams(features) for name in stream.schema.names
    )


def make_block_table_schema(bundled: bool = False) -> pa.Schema:
    """Return the columns of SPLIT/blocks.parquet, which has one row a block, in stored order."""
    lengths = pa.list_(pa.field("element", pa.int32(), nullable=False))
    columns = [
        ("shard", pa.int32()),
        ("num_episodes", pa.int32()),
        ("num_rows", pa.int32()),
        ("num_values", pa.int64()),
        ("unique_lengths", lengths),
        ("xxh3", pa.list_(pa.field("element", pa.int64(), nullable=False))),
        ("content_xxh3", pa.int64()),
    ]
    # Readers may ignore these two columns: the blocks are then read like any other.
    if bundled:
        columns += [("bundle_tasks", pa.int32()), ("bundle_unique_lengths", lengths)]
    return _make_schema(*columns)


def make_writer_options(stream: ShardStream, compact: bool) -> dict[str, object]:
    """Return the options of pyarrow.parquet.ParquetWriter for one stream."""
    # Positions decode at 14 ns a row of 26 ids as PLAIN, at 50 as DELTA_BINARY_PACKED, which takes
    # 0.6 of the bytes. Sorted ids: DELTA costs 1.2 ns each and saves 7 of 8 bytes.
    packed = {"unique"}
    if compact:
        packed |= {"positions", "multi", "episodes", "row_ids"}
    columns = stream.schema.names
    options: dict[str, object] = {
        "version": "2.6",
        "compression": "lz4" if compact else "none",
        "use_dictionary": columns if compact and stream.name == "rows" else False,
        # No reader filters these files by value, and statistics of positions say nothing.
        "write_statistics": False,
        "store_schema": False,
        # One page a column and block: its bytes are the values as in memory, which can be mapped.
        "data_page_size": 1 << 30,
    }
    # pyarrow 23 has a second limit of a page, 20,000 rows by default.
    if "max_rows_per_page" in inspect.signature(pq.ParquetWriter).parameters:
        options["max_rows_per_page"] = 1 << 30
    if options["use_dictionary"] is False:
        encoding = "DELTA_BINARY_PACKED" if stream.name in packed else "PLAIN"
        options["column_encoding"] = dict.fromkeys(columns, encoding)
    return options


def find_chunk_ranges(metadata: pq.FileMetaData, row_group: int) -> list[tuple[int, int]]:
    """Return the byte range [begin, end) of each column chunk of a row group."""
    group = metadata.row_group(row_group)
    ranges = []
    for index in range(group.num_columns):
        chunk = group.column(index)
        begin = chunk.data_page_offset
        # Writers put the dictionary before the data pages; older ones leave its offset at 0.
        if chunk.has_dictionary_page:
            begin = min(begin, chunk.dictionary_page_offset)
        ranges.append((begin, begin + chunk.total_compressed_size))
    return ranges


def write_vocabulary(values: pa.Array, file: Path) -> None:
    """Write the values behind a table's ids."""
    file.parent.mkdir(exist_ok=True)
    # Without Arrow's schema the bytes do not depend on the type that the engine had.
    pq.write_table(pa.table({"value": values}), file, store_schema=False)
