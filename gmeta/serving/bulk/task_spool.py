"""Encoded rows on disk, dealt by task to files that fit into memory one at a time.

Shape suffix: N rows"""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from io import BufferedReader
from pathlib import Path

import numpy as np
import pyarrow as pa

from gmeta.serving.bulk.row_files import RowFiles
from gmeta.serving.encoded_rows import EncodedColumns, empty_rows, join_rows, take_rows
from gmeta.serving.served_model import ServedModel
from metaio.format.features import Features
from metaio.hashing import splitmix64
from metaio.ragged import Int64, offsets

# Rows of both sides in memory at once: encoded rows of 39 columns are 300 bytes each.
PART_ROWS = 1 << 20
# With more of them, each batch would append only a few rows to each file of a spool.
_MAX_PARTS = 4_096
_NAMES = [field.name for field in fields(EncodedColumns)]

Advance = Callable[[int, int], None]  # work done, and all of it


class ModelTimer:
    """Adds up the model's time, and reports how far the work has come."""

    def __init__(self, advance: Advance, total: int) -> None:
        self.seconds = 0.0
        self._advance, self._total, self._done = advance, total, 0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began_s

    def advance_by(self, num_rows: int) -> None:
        """Report that `num_rows` more rows are done."""
        self._done += num_rows
        self._advance(self._done, self._total)


class TaskSpool:
    """All rows of a task in one of the parts, in their order, with their places among all rows."""

    def __init__(self, folder: Path, num_parts: int, features: Features) -> None:
        folder.mkdir()
        self._folder = folder
        self.num_parts = num_parts
        self._features = features
        self._num_rows = 0

    def append(self, rows: EncodedColumns, raw_task_N: pa.Array | None = None) -> None:
        """Write rows to the parts of their tasks, with their raw tasks if these are given."""
        # Mixed: integers are their own hashes, and ids in steps would fill few of the parts.
        part_N = splitmix64(rows.task_N.view(np.uint64)) % np.uint64(self.num_parts)
        order_N = np.argsort(part_N, kind="stable")
        bounds = offsets(np.bincount(part_N.astype(np.int64), minlength=self.num_parts))
        for part in np.flatnonzero(np.diff(bounds)).tolist():
            chosen = order_N[bounds[part] : bounds[part + 1]]
            part_rows = take_rows(rows, chosen)
            # Opened anew each time: there may be more parts than a process may have open.
            with self._path(part, "tasks").open("ab") as file:
                np.save(file, part_rows.task_N)
                np.save(file, chosen + self._num_rows)
            with self._path(part, "rows").open("ab") as file:
                for name in _NAMES:
                    np.save(file, getattr(part_rows, name))
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
        parts = [np.stack([np.load(file), np.load(file)]) for file in self._read(part, "tasks")]
        task_N, place_N = np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1)
        return task_N, place_N

    def rows(self, part: int) -> EncodedColumns:
        """Return the rows of a part."""
        batches = ((np.load(file) for _ in _NAMES) for file in self._read(part, "rows"))
        return join_rows([empty_rows(self._features), *(EncodedColumns(*one) for one in batches)])

    def raw_tasks(self, part: int) -> pa.ChunkedArray:
        """Return the raw task of each row of a part that has rows."""
        tables = [pa.ipc.open_stream(file).read_all() for file in self._read(part, "raw")]
        return pa.concat_tables(tables)["task"]

    def _read(self, part: int, what: str) -> Iterator[BufferedReader]:
        """Yield a file of a part at each thing that `append` wrote, for the caller to read it."""
        path = self._path(part, what)
        if path.exists():  # no row of any batch may have been in this part
            with path.open("rb") as file:
                while file.peek(1):
                    yield file

    def _path(self, part: int, what: str) -> Path:
        return self._folder / f"{part:05d}.{what}"


def parts_for(num_rows: int, part_rows: int) -> int:
    """Return in how many parts `num_rows` rows are spooled."""
    return min(max(1, -(-num_rows // part_rows)), _MAX_PARTS)


def spool_rows(
    model: ServedModel,
    files: RowFiles,
    what: str,
    folder: Path,
    num_parts: int,
    clock: ModelTimer,
    keeps_raw_tasks: bool = False,
) -> TaskSpool:
    """Return all rows of one side (`what`: support or query) by their tasks."""
    spool = TaskSpool(folder, num_parts, model.config.features)
    labelled = what == "support"
    needed = set(model.columns_read(labelled))
    # Parquet reads only these; the others are read once more when they are written.
    columns = [name for name in files.schema.names if name in needed]
    for batch in files.batches(columns):
        with clock:
            table = pa.Table.from_batches([batch])
            rows = model.encode(table, what, with_label=labelled, with_task=True)
        spool.append(rows, batch[model.config.columns.task] if keeps_raw_tasks else None)
        clock.advance_by(batch.num_rows)
    return spool
