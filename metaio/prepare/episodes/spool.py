"""Encoded rows on their way to shards: one file a bucket, read back a bucket at a time."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from metaio.prepare.episodes.encoded_rows import EncodedRows, allocate_rows, select_rows
from metaio.prepare.schema.schema import Schema
from metaio.ragged import Int64, offsets, sum_rows

# Gathered before they are written to their buckets' files: fewer, longer writes.
_FLUSH_ROWS = 131_072
_Part = tuple[int, EncodedRows]  # a bucket and some of its rows


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

    def __init__(self, folder: Path, schema: Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._pending: defaultdict[int, list[EncodedRows]] = defaultdict(list)
        self._pending_rows = 0
        # Rows and values of each part that was appended to a bucket's file.
        self._parts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        folder.mkdir()

    def append(self, parts: list[_Part]) -> None:
        """Add rows to their buckets."""
        for bucket, rows in parts:
            self._pending[bucket].append(rows)
            self._pending_rows += rows.num_rows
        if self._pending_rows >= _FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; needed before `pop_bucket`."""
        for bucket, parts in self._pending.items():
            # Opened each time: a log of a billion rows has more buckets than a process may open
            # files.
            with self._path(bucket).open("ab") as file:
                file.writelines(array.data for part in parts for array in vars(part).values())
            self._parts[bucket] += [(part.num_rows, len(part.values_V)) for part in parts]
        self._pending.clear()
        self._pending_rows = 0

    def pop_bucket(self, bucket: int) -> EncodedRows:
        """Return all rows of a bucket, and remove its file to free the space."""
        # A part in a file is its arrays, one after another; their lengths are kept in memory.
        parts = self._parts.pop(bucket, [])
        found = allocate_rows(self._schema, sum(n for n, _ in parts), sum(v for _, v in parts))
        if not parts:
            return found
        path = self._path(bucket)
        with path.open("rb") as file:
            row, value = 0, 0
            for num_rows, num_values in parts:
                for name, array in vars(found).items():
                    is_value = name == "values_V"
                    first, count = (value, num_values) if is_value else (row, num_rows)
                    into = array[first : first + count]
                    if file.readinto(into.data) != into.nbytes:
                        raise OSError(f"{path} was cut short while it was in use")
                row, value = row + num_rows, value + num_values
        path.unlink()
        return found

    def close(self) -> None:
        """Remove the folder, which must be empty by now."""
        self._folder.rmdir()

    def num_bytes(self, bucket: int) -> int:
        """Return the size of a bucket in memory, once read."""
        path = self._path(bucket)
        return path.stat().st_size if path.exists() else 0

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:06d}"
