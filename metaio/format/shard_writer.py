"""Writes the Parquet files of one shard, block by block, and computes their checksums."""

import mmap
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from metaio.errors import DataError
from metaio.format.block import Block, hash_content
from metaio.format.features import Features
from metaio.format.layout import (
    ShardStream,
    find_chunk_ranges,
    list_streams,
    make_block_table_schema,
    make_writer_options,
)
from metaio.format.manifest import MIN_FOOTER_BYTES, FileEntry, ShardEntry, xxh3_hex


def _to_int64(unsigned: int) -> int:
    # Spark has no unsigned 64-bit type, so checksums are stored as the int64 of the same bits.
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def _list_columns(block: Block, stream: ShardStream) -> list[Any]:
    if stream.name == "episodes":
        rows_T, values_T = np.diff(block.row_offsets_T1), np.diff(block.value_offsets_T1)
        return [block.task_T, rows_T, block.support_lengths_T, values_T]
    # One transposing copy makes each feature's lengths contiguous, which Arrow needs.
    if stream.name == "rows":
        labels = [block.label_N] if block.label_N.ndim == 1 else block.label_N.T
        weights = [block.weight_N] if "weight" in stream.schema.names else []
        known = [block.events_before_N] if "events_before" in stream.schema.names else []
        return [*labels, *weights, *known, *np.ascontiguousarray(block.multi_lengths_NM.T)]
    flat: dict[str, Any] = {
        "dense": block.dense_NK,
        "positions": block.positions_NF,
        "multi": block.multi_positions_V,
        "unique": block.unique_ids_U,
        "row_ids": block.row_id_N,
        "events": block.event_numbers,
    }
    return [flat[stream.name].ravel()]


def _make_table(block: Block, stream: ShardStream) -> pa.Table:
    columns = _list_columns(block, stream)
    arrays = [
        pa.array(column, type=kind)
        for column, kind in zip(columns, stream.schema.types, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=stream.schema)


def make_file_entry(data: memoryview) -> FileEntry:
    """Return size and checksums of a finished Parquet file, given its bytes."""
    # The footer's own checksum lets a reader trust it without reading the rest of the file.
    footer_bytes = int.from_bytes(data[-MIN_FOOTER_BYTES:][:4], "little") + MIN_FOOTER_BYTES
    return FileEntry(len(data), xxh3_hex(data), footer_bytes, xxh3_hex(data[-footer_bytes:]))


def map_file(path: Path) -> memoryview:
    """Return the bytes of a finished file, mapped; it is never empty."""
    # mmap refuses empty files, but a finished Parquet or Arrow file has at least its footer.
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class ShardWriter:
    """One shard being written below `folder`; finished by `close`, undone with the folder."""

    def __init__(
        self, folder: Path, split: str, shard: int, features: Features, compact: bool
    ) -> None:
        self._streams = list_streams(features)
        self._paths = [folder / stream.path(split, shard) for stream in self._streams]
        self._shard = shard
        self._blocks: list[dict[str, object]] = []
        (folder / split).mkdir(parents=True, exist_ok=True)
        self._writers = [
            pq.ParquetWriter(path, stream.schema, **make_writer_options(stream, compact))
            for path, stream in zip(self._paths, self._streams, strict=True)
        ]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks written so far."""
        return len(self._blocks)

    def write(self, block: Block) -> None:
        """Append one block as a row group of every file."""
        sizes = block.positions_NF.size, len(block.multi_positions_V), block.dense_NK.size
        if max(sizes) >= 1 << 31:
            raise DataError(
                f"a block of {block.num_rows} rows holds 2^31 or more values. Set block_rows "
                "lower, or max_rows so that no episode is that long"
            )
        for writer, stream in zip(self._writers, self._streams, strict=True):
            table = _make_table(block, stream)
            # One row group a block, also for a stream that is empty in it: readers count row
            # groups.
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._blocks.append(
            {
                "shard": self._shard,
                "num_episodes": block.num_episodes,
                "num_rows": block.num_rows,
                "num_values": len(block.multi_positions_V),
                "unique_lengths": np.diff(block.unique_offsets_B1),
                "content_xxh3": _to_int64(hash_content(block)),
                "bundle_tasks": 0 if block.bundles is None else block.bundles.num_tasks,
                "bundle_unique_lengths": ()
                if block.bundles is None
                else block.bundles.bundle_lengths.ravel(),
            }
        )

    def close(self) -> tuple[ShardEntry, pa.Table]:
        """Finish the files; return the manifest's entry and the shard's rows of the block table."""
        files = {}
        checksums: list[list[int]] = [[] for _ in self._blocks]
        for writer, stream, path in zip(self._writers, self._streams, self._paths, strict=True):
            writer.close()
            # Read back, not computed while writing: checksums are of what the file really holds.
            data = map_file(path)
            files[stream.name] = make_file_entry(data)
            metadata = pq.read_metadata(path)
            for row_group, row in enumerate(checksums):
                for begin, end in find_chunk_ranges(metadata, row_group):
                    row.append(_to_int64(xxhash.xxh3_64_intdigest(data[begin:end])))
        for block, row in zip(self._blocks, checksums, strict=True):
            block["xxh3"] = row
        # Without bundles the table has no columns of them, as in earlier releases.
        bundled = any(row["bundle_tasks"] for row in self._blocks)
        table = pa.Table.from_pylist(self._blocks, schema=make_block_table_schema(bundled))
        names = "num_episodes", "num_rows"
        num_episodes, num_rows = (int(np.sum(table[name].to_numpy())) for name in names)
        return ShardEntry(len(self._blocks), num_episodes, num_rows, files), table

    def abort(self) -> None:
        """Close the files; does nothing once the shard is finished."""
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
