"""Checks and decodes the row groups of one block.

Shape suffixes: T episodes, N rows, M multi-id features, B tables, U unique ids of all tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from metaio.block import Block, Int64, offsets
from metaio.errors import REMEDY, FormatError
from metaio.features import Features
from metaio.storage import Window


@dataclass(frozen=True)
class RowGroup:
    """The bytes of one row group of one file, and where its column chunks lie."""

    name: str  # address of the file
    index: int
    metadata: pq.FileMetaData
    window: Window
    ranges: list[tuple[int, int]]

    def check(self, checksums: list[int]) -> None:
        """Hold the bytes of each column chunk against its xxh3_64.

        Raises:
            FormatError: one differs.
        """
        for column, ((begin, end), wanted) in enumerate(zip(self.ranges, checksums, strict=True)):
            if xxhash.xxh3_64_intdigest(self.window.view(begin, end)) != wanted:
                column_name = self.metadata.schema.column(column).name
                raise FormatError(
                    f"{self.name}, row group {self.index}, column {column_name}: the bytes differ "
                    f"from the checksum in the block table. {REMEDY}"
                )

    def decode(self) -> list[npt.NDArray[np.generic]]:
        """The columns as arrays, which share Arrow's memory.

        Raises:
            FormatError: the pages are not what the footer says.
        """
        try:
            # The footer is given, not read again. One thread: other blocks keep the others busy.
            source = pq.ParquetFile(self.window.open(), metadata=self.metadata)
            table = source.reader.read_row_group(self.index, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise FormatError(
                f"{self.name}, row group {self.index} cannot be decoded: "
                f"{str(error).rstrip('.')}. {REMEDY}"
            ) from error
        columns = [_to_numpy(column) for column in table.columns]
        self.window.done(self.ranges[0][0], self.ranges[-1][1])
        return columns


def check_counts(
    place: str, decoded: Block, num_episodes: int, num_rows: int, num_values: int
) -> None:
    """Hold decoded arrays against the block table and each other, as a foreign writer may be wrong.

    Raises:
        FormatError: they contradict.
    """
    # Little beside decoding; unseen, it would be an index out of bounds in some step.
    faults = {
        "num_episodes": decoded.num_episodes != num_episodes,
        "num_rows": decoded.num_rows != num_rows or decoded.row_offsets_T1[-1] != decoded.num_rows,
        "num_values": len(decoded.multi_positions_V) != num_values
        or decoded.value_offsets_T1[-1] != len(decoded.multi_positions_V),
        "num_support": bool((decoded.support_lengths_T > np.diff(decoded.row_offsets_T1)).any()),
        "position": _outside(decoded.positions_NF, decoded.unique_ids_U)
        or _outside(decoded.multi_positions_V, decoded.unique_ids_U),
        "id": decoded.unique_offsets_B1[-1] != len(decoded.unique_ids_U),
    }
    for column, wrong in faults.items():
        if wrong:
            raise FormatError(
                f"{place}: column {column} contradicts the block table. The program that wrote it "
                "is at fault; docs/format.md says what belongs there"
            )


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[np.generic]:
    if column.num_chunks == 1:
        found: npt.NDArray[np.generic] = column.chunk(0).to_numpy()
        return found
    joined: npt.NDArray[np.generic] = column.combine_chunks().to_numpy(zero_copy_only=False)
    return joined


def _outside(positions: npt.NDArray[np.int32], unique_ids_U: Int64) -> bool:
    # As unsigned numbers negative ones are the largest: one pass over them instead of two.
    return bool(positions.size) and bool(positions.view(np.uint32).max() >= len(unique_ids_U))


def assemble(
    features: Features, columns: Mapping[str, list[Any]], unique_lengths_B: Int64
) -> Block:
    """The block of decoded columns, stream by stream; lengths become offsets."""
    task_T, num_rows_T, num_support_T, num_values_T = columns["episodes"]
    label_N, *length_columns = columns["rows"]
    num_rows = len(label_N)
    empty = np.zeros(0, dtype=np.int32)

    def flat(stream: str, absent: Any = empty) -> Any:
        return columns[stream][0] if stream in columns else absent

    lengths_NM = np.zeros((num_rows, len(length_columns)), dtype=np.int32)
    for index, column in enumerate(length_columns):
        lengths_NM[:, index] = column
    return Block(
        task_T=task_T.astype(np.int64, copy=False),
        row_offsets_T1=offsets(num_rows_T),
        support_lengths_T=num_support_T.astype(np.int64),
        value_offsets_T1=offsets(num_values_T),
        label_N=label_N.astype(np.float32, copy=False),
        dense_NK=flat("dense", np.zeros(0, dtype=np.float32)).reshape(
            num_rows, len(features.dense)
        ),
        positions_NF=flat("positions").reshape(num_rows, len(features.single)),
        multi_positions_V=flat("multi"),
        multi_lengths_NM=lengths_NM,
        unique_ids_U=flat("unique", np.zeros(0, dtype=np.int64)),
        unique_offsets_B1=offsets(unique_lengths_B),
    )
