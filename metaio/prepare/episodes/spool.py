"""Encoded rows on their way to shards: one file a bucket, read back a bucket at a time."""

import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaio.hashing import splitmix64
from metaio.prepare.episodes.encoded_rows import (
    EncodedRows,
    allocate_rows,
    concatenate_rows,
    select_rows,
)
from metaio.prepare.schema.schema import Schema
from metaio.ragged import Int64, offsets, sum_rows

# Gathered before they are dealt to their buckets' files. A batch of a billion rows has ten for each
# bucket: dealt by itself, Python would take most of the time.
_FLUSH_BYTES = 1 << 26
_Part = tuple[int, EncodedRows]  # a bucket and some of its rows
# Of a part in a file: rows, values, and the bytes that follow. These are compressed to a third: as
# they are, a billion rows would take more disk than the log and the dataset together.
_HEAD = struct.Struct("<3q")
_CODEC = "zstd"


def assign_buckets(task_hash: npt.NDArray[np.uint64], num_buckets: npt.NDArray[np.uint64]) -> Int64:
    """Return the bucket of each task: ranges of its hash, which keep the order of tasks."""
    # 32 bits spread tasks evenly, and leave room for the product in 64 bits.
    return ((task_hash >> np.uint64(32)) * num_buckets >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True)
class BucketPlan:
    """How many buckets each split has; they are numbered split by split, and become shards."""

    buckets_of_split: tuple[int, ...]

    def assign(self, split_N: npt.NDArray[np.int32], task_hash_N: npt.NDArray[np.uint64]) -> Int64:
        """Return the bucket of each row; a task's rows of one split share a bucket."""
        first = offsets(self.buckets_of_split)[:-1]
        own = np.array(self.buckets_of_split, dtype=np.uint64)
        buckets: Int64 = first[split_N] + assign_buckets(task_hash_N, own[split_N])
        return buckets

    def list_buckets(self, split: int) -> range:
        """Return the buckets of a split, in the order of their tasks."""
        bounds = offsets(self.buckets_of_split)
        return range(int(bounds[split]), int(bounds[split + 1]))

    def find_split(self, assign: int) -> int:
        """Return the split of a bucket."""
        return int(np.searchsorted(offsets(self.buckets_of_split), assign, side="right")) - 1


def plan_buckets(rows_of_split: list[int], rows_per_bucket: int) -> BucketPlan:
    """Return a plan of about one bucket for `rows_per_bucket` rows of a split."""
    # From counts alone, so that every engine plans the same buckets.
    return BucketPlan(tuple(max(1, round(rows / rows_per_bucket)) for rows in rows_of_split))


def split_by_bucket(plan: BucketPlan, rows: EncodedRows) -> list[_Part]:
    """Return the rows of each bucket that has any, ascending; rows keep their order."""
    buckets = plan.assign(rows.split_N, rows.task_hash_N)
    # numpy sorts 16-bit integers by radix, which is faster.
    narrow = buckets.astype(np.uint16) if buckets.max(initial=0) < 1 << 16 else buckets
    ordered = select_rows(rows, np.argsort(narrow, kind="stable"))
    value_offsets = offsets(sum_rows(ordered.lengths_NM))
    bounds = offsets(np.bincount(buckets))
    found = []
    for bucket in np.flatnonzero(np.diff(bounds)).tolist():
        own = slice(int(bounds[bucket]), int(bounds[bucket + 1]))
        values = slice(int(value_offsets[own.start]), int(value_offsets[own.stop]))
        arrays = vars(ordered).items()
        part = {name: array[values if name == "values_V" else own] for name, array in arrays}
        found.append((bucket, EncodedRows(**part)))
    return found


class Spool:
    """Bucket files below a folder of its own; the caller removes the folder."""

    def __init__(self, folder: Path, schema: Schema, plan: BucketPlan) -> None:
        self._folder = folder
        self._schema, self._plan = schema, plan
        self._pending: list[EncodedRows] = []
        self._pending_bytes = 0
        # Rows, values and bytes in memory of each bucket that has any.
        self._sizes: defaultdict[int, Int64] = defaultdict(lambda: np.zeros(3, np.int64))
        folder.mkdir()

    def append(self, rows: EncodedRows) -> None:
        """Add rows to their buckets."""
        self._pending.append(rows)
        self._pending_bytes += _count_bytes(rows)
        if self._pending_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; needed before `pop_bucket`."""
        pending = concatenate_rows(self._schema, self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        for bucket, rows in split_by_bucket(self._plan, pending):
            num_values = len(rows.values_V)
            self._sizes[bucket] += rows.num_rows, num_values, _count_bytes(rows)
            arrays = _stored_arrays(rows).values()
            packed = pa.compress(b"".join(array.data for array in arrays), _CODEC)
            # Opened each time: a log of a billion rows has more buckets than a process may open
            # files.
            with self._path(bucket).open("ab") as file:
                file.write(_HEAD.pack(rows.num_rows, num_values, packed.size))
                file.write(packed)

    def pop_bucket(self, bucket: int) -> EncodedRows:
        """Return all rows of a bucket, and remove its file to free the space."""
        num_rows, num_values, _ = self._sizes.pop(bucket, (0, 0, 0))
        found, path = allocate_rows(self._schema, num_rows, num_values), self._path(bucket)
        if not num_rows:
            return found
        with path.open("rb") as file:
            row = value = 0
            while row < num_rows:
                own_rows, own_values, packed = _read_part(file)
                arrays = {
                    name: array[value:][:own_values]
                    if name == "values_V"
                    else array[row:][:own_rows]
                    for name, array in _stored_arrays(found).items()
                }
                raw = pa.decompress(packed, sum(a.nbytes for a in arrays.values()), _CODEC)
                first = 0
                for array in arrays.values():
                    read = np.frombuffer(raw, array.dtype, array.size, first)
                    array[...] = read.reshape(array.shape)
                    first += array.nbytes
                row, value = row + own_rows, value + own_values
        found.task_hash_N[:] = splitmix64(found.task_N.view(np.uint64))
        path.unlink()
        return found

    def close(self) -> None:
        """Remove the folder, which must be empty by now."""
        self._folder.rmdir()

    def num_bytes(self, bucket: int) -> int:
        """Return the size of a bucket in memory, once read."""
        return int(self._sizes[bucket][2]) if bucket in self._sizes else 0

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:06d}"


def _count_bytes(rows: EncodedRows) -> int:
    return sum(array.nbytes for array in vars(rows).values())


def _stored_arrays(rows: EncodedRows) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a part in a file: all but the hash of the task, which its id gives."""
    return {name: array for name, array in vars(rows).items() if name != "task_hash_N"}


def _read_part(file: IO[bytes]) -> tuple[int, int, bytes]:
    """Return the next part of a bucket's file: rows, values, and its arrays, compressed."""
    head = file.read(_HEAD.size)
    num_rows, num_values, num_bytes = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 1)
    packed = file.read(num_bytes)
    if len(packed) < num_bytes:
        raise OSError(f"{file.name} was cut short while it was in use")
    return num_rows, num_values, packed
