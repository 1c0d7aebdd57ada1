"""Checks and decodes the row groups of one block.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, B tables, E chosen episodes, U unique ids"""

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from metaio.errors import REMEDY, FormatError, make_content_error
from metaio.format.block import (
    Block,
    Bundles,
    are_positions_valid,
    make_no_counts,
    make_no_events,
    make_no_numbers,
    make_no_row_ids,
    make_no_weights,
)
from metaio.format.features import Features
from metaio.format.layout import ShardStream, find_chunk_ranges
from metaio.format.storage import ByteWindow
from metaio.quantities import format_count
from metaio.ragged import Int32, Int64, offsets, sum_rows

# How Parquet's types lie in a plain page: little-endian.
_PLAIN_TYPES: dict[str, np.dtype[Any]] = {
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FLOAT": np.dtype("<f4"),
}


@dataclass(frozen=True)
class RowGroup:
    """The bytes of one row group of one file, or of some of its columns, and where their column
    chunks lie."""

    name: str  # address of the file
    index: int
    metadata: pq.FileMetaData
    window: ByteWindow
    ranges: list[tuple[int, int]]
    columns: Sequence[int]  # of the file, one for each range

    def check(self, checksums: list[int]) -> None:
        """Raise FormatError for a column chunk whose bytes have another xxh3_64."""
        parts = zip(self.columns, self.ranges, checksums, strict=True)
        for column, (begin, end), wanted in parts:
            if xxhash.xxh3_64_intdigest(self.window.view(begin, end)) != wanted:
                column_name = self.metadata.schema.column(column).name
                raise FormatError(
                    f"{self.name}, row group {self.index}, column {column_name}: the bytes differ "
                    f"from the checksum in the block table. {REMEDY}"
                )

    def decode(self, in_place: bool = False) -> list[npt.NDArray[np.generic]]:
        """Return the columns as arrays that share Arrow's memory, or the file's with `in_place`."""
        # In place only where bytes are values, and few enough files are mapped; such arrays may
        # begin at any address.
        stored = self._view_plain_columns() if in_place and self.window.can_be_held() else None
        if stored is not None:
            return stored
        try:
            # The footer is passed on, not read again. One thread: other blocks keep the cores busy.
            source = pq.ParquetFile(self.window.open(), metadata=self.metadata)
            table = source.reader.read_row_group(self.index, self.columns, use_threads=False)
            columns = [_to_numpy(column) for column in table.columns]
        except (pa.ArrowException, OSError) as error:
            raise FormatError(
                f"{self.name}, row group {self.index} cannot be decoded: "
                f"{str(error).rstrip('.')}. {REMEDY}"
            ) from error
        self.window.release(self.ranges[0][0], self.ranges[-1][1])
        return columns

    def _view_plain_columns(self) -> list[npt.NDArray[np.generic]] | None:
        """Return views of the file if each column is one page of plain values, else None."""
        found = []
        group = self.metadata.row_group(self.index)
        for index, (begin, end) in zip(self.columns, self.ranges, strict=True):
            column = group.column(index)
            kind = _PLAIN_TYPES.get(column.physical_type)
            # Metadata may be forged: a negative count would lead in front of the chunk.
            if kind is None or column.num_values < 0 or column.compression != "UNCOMPRESSED":
                return None
            start = end - column.num_values * kind.itemsize
            # Required values have no levels: a page of that size holds all of them, and nothing
            # else.
            header = bytes(self.window.view(begin, max(start, begin)))
            if not header.startswith(_encode_page_header(column.num_values, kind.itemsize)):
                return None
            found.append(np.frombuffer(self.window.view(start, end), dtype=kind))
        for values, (begin, end) in zip(found, self.ranges, strict=True):
            self.window.will_need(begin, end)
            # The map's pages may leave memory once the last array that views them is gone.
            weakref.finalize(values, self.window.release, begin, end).atexit = False
        return found


def _encode_page_header(num_values: int, item_bytes: int) -> bytes:
    """Return how the header of an uncompressed data page of plain values begins."""
    # Thrift's compact protocol: type DATA_PAGE, size uncompressed and compressed, then
    # DataPageHeader with the number of values and the encoding PLAIN.
    size = b"\x15" + _encode_varint(num_values * item_bytes)
    return b"\x15\x00" + size * 2 + b"\x2c\x15" + _encode_varint(num_values) + b"\x15\x00"


def _encode_varint(number: int) -> bytes:
    """Return a non-negative number as Thrift writes it: zigzag, seven bits a byte, lowest first."""
    rest, found = 2 * number, bytearray()
    while rest >= 0x80:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*found, rest])


def read_footer(
    name: str, data: memoryview, stream: ShardStream, num_blocks: int, num_bytes: int
) -> pq.FileMetaData:
    """Return the metadata of a file of `num_bytes`, parsed from its footer."""
    # Its checksum is right, but a foreign program may have written both.
    try:
        metadata = pq.read_metadata(pa.BufferReader(pa.py_buffer(data)))
        schema = metadata.schema.to_arrow_schema()
        groups = [find_chunk_ranges(metadata, index) for index in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise make_content_error(f"{name}: the footer cannot be decoded: {error}") from error
    if (schema.names, schema.types) != (stream.schema.names, stream.schema.types):
        raise make_content_error(
            f"{name} has other columns or types than {', '.join(stream.schema.names)}"
        )
    if len(groups) != num_blocks:
        raise make_content_error(
            f"{name} has {len(groups)} row groups, its shard {num_blocks} blocks"
        )
    for ranges in groups:
        bounds = [0, *itertools.chain(*ranges), num_bytes]
        if bounds != sorted(bounds):  # one after another: they are fetched as one range
            raise make_content_error(
                f"{name}: a column chunk lies outside of the file's {num_bytes} bytes"
            )
    return metadata


def check_counts(
    place: str,
    features: Features,
    decoded: Block,
    num_episodes: int,
    num_rows: int,
    num_values: int,
) -> None:
    """Raise FormatError where decoded arrays contradict the block table or each other."""
    # Cheap beside decoding; without it a foreign writer's mistake would be an index error in some
    # step of training.
    for column in _find_contradictions(features, decoded, num_episodes, num_rows, num_values):
        raise _make_contradiction(place, column)


def check_num_rows(place: str, num_rows_E: Int32, num_episodes: int, num_rows: int) -> None:
    """Raise FormatError where the rows of a block's episodes contradict the block table."""
    is_short = num_rows_E.min(initial=1) < 1
    if len(num_rows_E) != num_episodes or num_rows_E.sum() != num_rows or is_short:
        raise _make_contradiction(place, "num_rows")


def _make_contradiction(place: str, column: str) -> FormatError:
    return FormatError(
        f"{place}: column {column} contradicts the block table. The program that wrote it is "
        "at fault; docs/format.md says what belongs there"
    )


def _find_contradictions(
    features: Features, decoded: Block, num_episodes: int, num_rows: int, num_values: int
) -> Iterator[str]:
    """Yield the columns that are wrong; those after the first may be wrong because of it."""
    rows_T, row_offsets_T1 = np.diff(decoded.row_offsets_T1), decoded.row_offsets_T1
    if decoded.num_episodes != num_episodes:
        yield "num_episodes"
    if not decoded.num_rows == num_rows == row_offsets_T1[-1] or rows_T.min(initial=1) < 1:
        yield "num_rows"
    if decoded.multi_lengths_NM.min(initial=0) < 0:
        yield "length"
    values_T1 = offsets(sum_rows(decoded.multi_lengths_NM))[row_offsets_T1]
    if not np.array_equal(values_T1, decoded.value_offsets_T1) or values_T1[-1] != num_values:
        yield "num_values"
    if len(decoded.multi_positions_V) != num_values:
        yield "num_values"
    if len(decoded.row_id_N) != (num_rows if features.row_id else 0):
        yield "row_id"
    support_T = decoded.support_lengths_T
    if support_T.min(initial=0) < 0 or (support_T > rows_T).any():
        yield "num_support"
    if features.events and not _are_events_valid(features, decoded):
        yield "events_before"
    if not are_positions_valid(features, decoded):
        yield "position"
    if not _are_ids(features, decoded.unique_ids_U, decoded.unique_offsets_B1):
        yield "id"


def _are_events_valid(features: Features, decoded: Block) -> bool:
    """Return whether lists of events stand in first rows, equally long, and rows know parts."""
    lengths_of_events = decoded.multi_lengths_NM[:, len(features.multi) :]
    num_events_T, before_N = decoded.num_events_T, decoded.events_before_N
    first_T, rows_T = decoded.row_offsets_T1[:-1], np.diff(decoded.row_offsets_T1)
    if len(before_N) != decoded.num_rows or len(decoded.event_numbers) != num_events_T.sum():
        return False
    in_first_M = lengths_of_events[first_T].sum(axis=0, dtype=np.int64)
    return bool(
        (lengths_of_events[first_T] == num_events_T[:, None]).all()
        and (in_first_M == lengths_of_events.sum(axis=0, dtype=np.int64)).all()
        and before_N.min(initial=0) >= 0
        and (before_N <= np.repeat(num_events_T, rows_T)).all()
    )


def _are_ids(features: Features, unique_ids_U: Int64, unique_offsets_B1: Int64) -> bool:
    """Return whether each table's ids are rows of it."""
    parts = np.split(unique_ids_U, unique_offsets_B1[1:-1])
    return unique_offsets_B1[-1] == len(unique_ids_U) and not any(
        _has_outside(own, table.num_rows)
        for table, own in zip(features.tables, parts, strict=False)
    )


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[np.generic]:
    if column.null_count:
        raise pa.ArrowInvalid(f"it holds {format_count(column.null_count, 'null')}")
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    found: npt.NDArray[np.generic] = array.to_numpy()
    return found


def _has_outside(values: Int64, stop: int) -> bool:
    # Unsigned, negative ids are the largest: one pass checks both bounds.
    return bool(values.size) and bool(values.view(np.uint64).max() >= stop)


def assemble_block(
    features: Features,
    columns: Mapping[str, list[Any]],
    unique_lengths_B: Int64,
    bundles: Bundles | None = None,
) -> Block:
    """Return the block of decoded columns by stream; lengths become offsets."""
    task_T, num_rows_T, num_support_T, num_values_T = columns["episodes"]
    num_labels, of_rows = features.num_labels, columns["rows"]
    labels, length_columns = of_rows[:num_labels], of_rows[num_labels:]
    label_N = labels[0] if num_labels == 1 else np.stack(labels, axis=1)
    weight_N = length_columns.pop(0) if features.weight else make_no_weights()
    before_N = length_columns.pop(0) if features.events else make_no_counts()
    num_rows, row_offsets_T1 = len(label_N), offsets(num_rows_T)
    empty = np.zeros(0, dtype=np.int32)

    def flat(stream: str, absent: Any = empty) -> Any:
        return columns[stream][0] if stream in columns else absent

    lengths_NM = np.empty((num_rows, len(length_columns)), dtype=np.int32)
    for index, column in enumerate(length_columns):
        lengths_NM[:, index] = column
    num_events_T, event_numbers = make_no_events(), make_no_numbers()
    if features.events:
        # Clipped: a count that a foreign writer got wrong is found by `check_counts`.
        first_T = np.minimum(row_offsets_T1[:-1], max(num_rows - 1, 0))
        num_events_T = lengths_NM[first_T, len(features.multi)].astype(np.int64)
        event_numbers = flat("events").reshape(-1, features.num_event_numbers)
    return Block(
        task_T=task_T.astype(np.int64, copy=False),
        row_offsets_T1=row_offsets_T1,
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
        row_id_N=flat("row_ids", make_no_row_ids()),
        weight_N=weight_N.astype(np.float32, copy=False),
        num_events_T=num_events_T,
        event_numbers=event_numbers,
        events_before_N=before_N,
        bundles=bundles,
    )
