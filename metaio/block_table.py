"""The block table of a split: counts and checksums of its blocks, read when a dataset is opened.

Shape suffixes: X blocks of a split in stored order, B tables, C column chunks of a block.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from metaio.errors import REMEDY, FormatError
from metaio.features import Features
from metaio.layout import block_table_schema
from metaio.manifest import SplitEntry, xxh3_hex
from metaio.storage import Storage

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockTable:
    """Counts and checksums of the blocks of a split, in stored order."""

    shard_X: Int64
    num_episodes_X: Int64
    num_rows_X: Int64
    num_values_X: Int64
    unique_lengths_XB: Int64
    xxh3_XC: npt.NDArray[np.uint64]  # C column chunks, see layout.checksum_columns
    content_xxh3_X: Int64


def read_block_table(
    storage: Storage, path: str, entry: SplitEntry, features: Features, num_columns: int
) -> BlockTable:
    """The table at `path`, whose blocks have `num_columns` column chunks each.

    Raises:
        FormatError: it is missing or altered, or its lists have the wrong lengths.
    """
    data = storage.read(path)
    if xxh3_hex(data) != entry.block_table.xxh3:
        raise FormatError(
            f"{storage.name(path)} differs from the checksum in the manifest. {REMEDY}"
        )
    # Only now: what passed its checksum is what its writer closed.
    table = pq.read_table(pa.BufferReader(data), schema=block_table_schema())

    def flat(name: str) -> Int64:
        column = table[name].combine_chunks()
        values = column.flatten() if pa.types.is_list(column.type) else column
        found: Int64 = values.to_numpy(zero_copy_only=False).astype(np.int64)
        return found

    unique_lengths, xxh3 = flat("unique_lengths"), flat("xxh3")
    num_blocks, num_tables = table.num_rows, len(features.tables)
    # A foreign writer may give lists of any length; ours cannot once the checksum matches.
    if (len(unique_lengths), len(xxh3)) != (num_blocks * num_tables, num_blocks * num_columns):
        raise FormatError(
            f"{storage.name(path)} must list {num_tables} unique lengths and {num_columns} "
            "checksums for each block. The program that wrote it is at fault; see docs/format.md"
        )
    return BlockTable(
        shard_X=flat("shard"),
        num_episodes_X=flat("num_episodes"),
        num_rows_X=flat("num_rows"),
        num_values_X=flat("num_values"),
        unique_lengths_XB=unique_lengths.reshape(num_blocks, num_tables),
        # Stored signed, since Spark has no unsigned type; the bits are those of the hash.
        xxh3_XC=xxh3.view(np.uint64).reshape(num_blocks, num_columns),
        content_xxh3_X=flat("content_xxh3"),
    )
