"""Encoded rows on disk, dealt by task to files that fit into memory one at a time.

Shape suffixes: N rows.
"""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa

from gmeta.serving.rows import EncodedColumns, join_rows, no_rows, take_rows
from metaio.format.features import Features
from metaio.hashing import splitmix64
from metaio.ragged import Int64, offsets

_NAMES = [field.name for field in fields(EncodedColumns)]


class TaskSpool:
    """All rows of a task in one of the parts, in the order in which they came, each with its place
    among all rows. The caller removes the folder.
    """

    def __init__(self, folder: Path, num_parts: int, features: Features) -> None:
        folder.mkdir()
        self._folder = folder
        self.num_parts = num_parts
        self._features = features
        self._num_rows = 0

    def append(self, rows: EncodedColumns, raw_task_N: pa.Array | None = None) -> None:
        """Write rows to the parts of their tasks; where `raw_task_N` is given, it is kept too."""
        part_N = splitmix64(rows.task_N.view(np.uint64)) % np.uint64(self.num_parts)
        order_N = np.argsort(part_N, kind="stable")
        bounds = offsets(np.bincount(part_N.astype(np.int64), minlength=self.num_parts))
        for part in np.flatnonzero(np.diff(bounds)).tolist():
            chosen = order_N[bounds[part] : bounds[part + 1]]
            taken = take_rows(rows, chosen)
            # Opened anew each time: there may be more parts than a process may have open.
            with self._path(part, "tasks").open("ab") as file:
                np.save(file, taken.task_N)
                np.save(file, chosen + self._num_rows)
            with self._path(part, "rows").open("ab") as file:
                for name in _NAMES:
                    np.save(file, getattr(taken, name))
            if raw_task_N is not None:
                raw = pa.record_batch([raw_task_N.take(pa.array(chosen))], ["task"])
                with (
                    self._path(part, "raw").open("ab") as file,
                    pa.ipc.new_stream(file, raw.schema) as writer,
                ):
                    writer.write_batch(raw)
        self._num_rows += rows.num_rows

    def tasks(self, part: int) -> tuple[Int64, Int64]:
        """Return the task of each row of a part, and the place of the row."""
        found = [np.zeros((2, 0), np.int64)]
        path = self._path(part, "tasks")
        if path.exists():
            with path.open("rb") as file:
                while file.peek(1):
                    found.append(np.stack([np.load(file), np.load(file)]))
        task_N, place_N = np.concatenate(found, axis=1)
        return task_N, place_N

    def rows(self, part: int) -> EncodedColumns:
        """Return the rows of a part."""
        found = [no_rows(self._features)]
        path = self._path(part, "rows")
        if path.exists():
            with path.open("rb") as file:
                while file.peek(1):
                    found.append(EncodedColumns(*(np.load(file) for _ in _NAMES)))
        return join_rows(found)

    def raw_tasks(self, part: int) -> pa.ChunkedArray:
        """Return the raw task of each row of a part that has rows."""
        found = []
        with self._path(part, "raw").open("rb") as file:
            while file.peek(1):
                found.append(pa.ipc.open_stream(file).read_all())
        return pa.concat_tables(found)["task"]

    def _path(self, part: int, what: str) -> Path:
        return self._folder / f"{part:05d}.{what}"
