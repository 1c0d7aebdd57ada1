"""The block table of a split: counts and checksums of its blocks, read when a dataset is opened.

Shape suffixes: B tables, Z blocks"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from metaio.errors import REMEDY, FormatError, make_content_error
from metaio.format.block import Bundles, make_bundles
from metaio.format.features import Features
from metaio.format.layout import make_block_table_schema
from metaio.format.manifest import SplitEntry, xxh3_hex
from metaio.format.storage import Storage
from metaio.ragged import Int64, owners


@dataclass(frozen=True)
class BlockTable:
    """Counts and checksums of the blocks of a split, in stored order."""

    shard_Z: Int64
    num_episodes_Z: Int64
    num_rows_Z: Int64
    num_values_Z: Int64
    unique_lengths_ZB: Int64
    xxh3_Z: npt.NDArray[np.uint64]  # [Z, column chunks], see layout.checksum_columns
    content_xxh3_Z: Int64
    bundle_tasks: int = 0  # episodes of each bundle; 0: there are none
    bundle_unique_lengths: tuple[Int64, ...] = ()  # [bundles, B] of each block, where there are

    def bundles(self, block: int) -> Bundles | None:
        """Return the bundles of a block; None where the split has none."""
        if not self.bundle_tasks:
            return None
        return make_bundles(self.bundle_tasks, self.bundle_unique_lengths[block])


def read_block_table(
    storage: Storage, path: str, entry: SplitEntry, features: Features, num_columns: int
) -> BlockTable:
    """Return the table at `path`, whose blocks have `num_columns` column chunks each."""
    data = storage.read(path)
    if xxh3_hex(data) != entry.block_table.xxh3:
        raise FormatError(
            f"{storage.name(path)} differs from the checksum in the manifest. {REMEDY}"
        )
    # After the checksum: only what its writer closed is parsed.
    try:
        source = pa.BufferReader(data)
        bundled = "bundle_tasks" in pq.read_schema(source).names
        table = pq.read_table(source, schema=make_block_table_schema(bundled))
        flat = {name: _flatten_column(table[name].combine_chunks()) for name in table.column_names}
    except (pa.ArrowException, OSError) as error:
        raise make_content_error(f"{storage.name(path)} cannot be decoded: {error}") from error
    num_blocks, num_tables = table.num_rows, len(features.tables)
    # The checksum proves that the file is complete, not that a foreign writer filled it correctly.
    due = num_blocks * num_tables, num_blocks * num_columns
    if (len(flat["unique_lengths"]), len(flat["xxh3"])) != due:
        raise make_content_error(
            f"{storage.name(path)} must list {num_tables} unique lengths and {num_columns} "
            "checksums for each block"
        )
    _check_counts(storage.name(path), entry, flat)
    bundle_tasks, bundle_lengths = _parse_bundles(storage.name(path), flat, num_blocks, num_tables)
    return BlockTable(
        shard_Z=flat["shard"],
        num_episodes_Z=flat["num_episodes"],
        num_rows_Z=flat["num_rows"],
        num_values_Z=flat["num_values"],
        unique_lengths_ZB=flat["unique_lengths"].reshape(num_blocks, num_tables),
        # Stored signed, since Spark has no unsigned type; the bits are those of the hash.
        xxh3_Z=flat["xxh3"].view(np.uint64).reshape(num_blocks, num_columns),
        content_xxh3_Z=flat["content_xxh3"],
        bundle_tasks=bundle_tasks,
        bundle_unique_lengths=bundle_lengths,
    )


def _parse_bundles(
    name: str, flat: dict[str, Int64], num_blocks: int, num_tables: int
) -> tuple[int, tuple[Int64, ...]]:
    """Return a bundle's episodes and each block's unique lengths [bundles, B]; 0, () without."""
    if "bundle_tasks" not in flat or not num_blocks or not num_tables:
        return 0, ()
    tasks_Z, lengths = flat["bundle_tasks"], flat["bundle_unique_lengths"]
    num_tasks = int(tasks_Z[0])
    if num_tasks < 1 or (tasks_Z != num_tasks).any():
        raise make_content_error(
            f"{name}: column bundle_tasks must hold one number from 1 on, it holds "
            f"{tasks_Z.min()} to {tasks_Z.max()}"
        )
    # Rounded up: the last bundle of a block may be smaller.
    num_bundles_Z = -(-flat["num_episodes"] // num_tasks)
    totals_ZB = flat["unique_lengths"].reshape(num_blocks, num_tables)
    if len(lengths) == num_bundles_Z.sum() * num_tables and lengths.min(initial=0) >= 0:
        cuts = np.cumsum(num_bundles_Z)[:-1] * num_tables
        found = tuple(part.reshape(-1, num_tables) for part in np.split(lengths, cuts))
        sums = [part.sum(axis=0) for part in found]
        if all(map(np.array_equal, sums, totals_ZB)):
            return num_tasks, found
    raise make_content_error(f"{name}: column bundle_unique_lengths contradicts unique_lengths")


def _flatten_column(column: pa.Array) -> Int64:
    """Return a column as int64, lists end to end; raise ArrowInvalid for a null."""
    values = column.flatten() if pa.types.is_list(column.type) else column
    if column.null_count or values.null_count:
        raise pa.ArrowInvalid("it holds a null")
    found: Int64 = values.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _check_counts(name: str, entry: SplitEntry, flat: dict[str, Int64]) -> None:
    """Raise FormatError where the counts of the blocks contradict the manifest."""
    # Readers find blocks by sums of these counts: wrong ones would lead them to other bytes.
    for column in ("num_episodes", "num_rows", "num_values", "unique_lengths"):
        if flat[column].min(initial=0) < 0:
            raise make_content_error(
                f"{name}: column {column} holds {flat[column].min()}; 0 is the least"
            )
        if column != "unique_lengths" and flat[column].sum() != getattr(entry, column):
            raise make_content_error(
                f"{name}: column {column} adds up to {flat[column].sum()}, the manifest says "
                f"{getattr(entry, column)}"
            )
    lengths = [shard.num_blocks for shard in entry.shards]
    # The sum first: owners() allocates that many numbers, and forged lengths may be huge.
    if sum(lengths) != len(flat["shard"]) or not np.array_equal(flat["shard"], owners(lengths)):
        raise make_content_error(f"{name}: column shard contradicts the shards of the manifest")
