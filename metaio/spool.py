"""Encoded rows on their way to shards: one file a bucket, read back a bucket at a time."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from metaio.block import offsets, ragged_indices
from metaio.encode import EncodedRows, array_types
from metaio.episodes import bucket_of
from metaio.schema import Schema

Int64 = npt.NDArray[np.int64]

# Rows gathered before they are dealt to the buckets: fewer, longer writes.
_FLUSH_ROWS = 131_072


@dataclass(frozen=True)
class BucketPlan:
    """How many buckets each split has; a bucket becomes a shard. Split by split."""

    buckets_of_split: tuple[int, ...]

    def bucket(self, split_N: npt.NDArray[np.int32], task_hash_N: npt.NDArray[np.uint64]) -> Int64:
        """Bucket of each row; a task's rows of one split share a bucket."""
        first = offsets(self.buckets_of_split)[:-1]
        own = np.array(self.buckets_of_split, dtype=np.uint64)
        buckets: Int64 = first[split_N] + bucket_of(task_hash_N, own[split_N])
        return buckets

    def of_split(self, split: int) -> range:
        """Buckets of a split, in the order of their tasks."""
        bounds = offsets(self.buckets_of_split)
        return range(int(bounds[split]), int(bounds[split + 1]))


def plan_buckets(rows_of_split: list[int], rows_per_bucket: int) -> BucketPlan:
    """One bucket for about `rows_per_bucket` rows of a split, at least one."""
    return BucketPlan(tuple(max(1, round(rows / rows_per_bucket)) for rows in rows_of_split))


def take_rows(rows: EncodedRows, chosen: Int64) -> EncodedRows:
    """The chosen rows, in the order chosen."""
    value_offsets = offsets(rows.lengths_NM.sum(axis=1, dtype=np.int64))
    values = ragged_indices(value_offsets[chosen], np.diff(value_offsets)[chosen])
    arrays = {
        name: np.take(array, values if name == "values_V" else chosen, axis=0)
        for name, array in vars(rows).items()
    }
    return EncodedRows(**arrays)


def concat(parts: list[EncodedRows]) -> EncodedRows:
    """All rows of at least one part, in order."""
    names = vars(parts[0])
    return EncodedRows(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def split_by_bucket(plan: BucketPlan, rows: EncodedRows) -> list[tuple[int, EncodedRows]]:
    """The rows of each bucket that has any, ascending; rows keep their order."""
    buckets = plan.bucket(rows.split_N, rows.task_hash_N)
    narrow = buckets.astype(np.uint16) if buckets.max(initial=0) < 1 << 16 else buckets
    ordered = take_rows(rows, np.argsort(narrow, kind="stable"))  # a radix sort for 16 bits
    value_offsets = offsets(ordered.lengths_NM.sum(axis=1, dtype=np.int64))
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
    """Bucket files below a folder of its own; the caller deletes the folder."""

    def __init__(self, folder: Path, schema: Schema, plan: BucketPlan) -> None:
        self._folder = folder
        self._types = array_types(schema)
        self._plan = plan
        self._pending: list[EncodedRows] = []
        # Rows and values of each part that was appended to a bucket's file.
        self._parts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        folder.mkdir()

    def append(self, rows: EncodedRows) -> None:
        """Add rows to their buckets."""
        self._pending.append(rows)
        if sum(part.num_rows for part in self._pending) >= _FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; needed before `take`."""
        if not self._pending:
            return
        rows = concat(self._pending)
        self._pending = []
        for bucket, part in split_by_bucket(self._plan, rows):
            # Opened anew each time: a log of a billion rows has more buckets than open files.
            with self._path(bucket).open("ab") as file:
                for array in vars(part).values():
                    array.tofile(file)
            self._parts[bucket].append((part.num_rows, len(part.values_V)))

    def take(self, bucket: int) -> EncodedRows:
        """All rows of a bucket; its file is removed to free the space."""
        # A part is its arrays one after another; their lengths are in memory, not in the file.
        path = self._path(bucket)
        parts = self._parts.pop(bucket, [])
        if not parts:
            path.touch()
        with path.open("rb") as file:
            found = [self._read(file, *part) for part in parts or [(0, 0)]]
        path.unlink()
        return concat(found)

    def close(self) -> None:
        """Remove the folder, which must be empty by now."""
        self._folder.rmdir()

    def num_bytes(self, bucket: int) -> int:
        """Size of a bucket in memory once taken."""
        path = self._path(bucket)
        return path.stat().st_size if path.exists() else 0

    def _read(self, file: IO[bytes], num_rows: int, num_values: int) -> EncodedRows:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (dtype, width) in self._types.items():
            rows = num_values if name == "values_V" else num_rows
            flat = np.fromfile(file, dtype, rows * (1 if width is None else width))
            arrays[name] = flat if width is None else flat.reshape(rows, width)
        return EncodedRows(**arrays)

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:06d}"
