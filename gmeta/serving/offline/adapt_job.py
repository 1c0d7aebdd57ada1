"""`gmeta adapt`: from files of any size to one file of their tasks' states. Rows are
spooled by task, as for `gmeta predict`; chunks of entire tasks then go to processes.

Shape suffix: N rows"""

import multiprocessing as mp
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.local_paths import check_replaceable
from gmeta.serving.bulk.row_files import RowFiles, atomic_output
from gmeta.serving.bulk.task_spool import (
    PART_ROWS,
    Advance,
    ModelTimer,
    TaskSpool,
    parts_for,
    spool_rows,
)
from gmeta.serving.bulk.text_rows import open_rows
from gmeta.serving.encoded_rows import EncodedColumns, join_rows, split_rows, take_rows
from gmeta.serving.model_loader import load
from gmeta.serving.offline.adapt_rows import CHUNK_ROWS, STATE_COLUMNS, adapt_rows
from gmeta.serving.served_model import ServedModel

_CHUNKS_A_PROCESS = 2  # under way: one that is computed, one that waits
_LOOK_EVERY_S = 1.0
_STATES_AT_ONCE = 1_024  # read from a file; one of many support rows takes 100 KB and more
MODEL_KEY = b"gmeta.model"  # in the file's metadata: the checksum of the model

Chunk = tuple[EncodedColumns, pa.ChunkedArray, bool]  # rows, the raw task of each, with_support


@dataclass(frozen=True)
class AdaptSummary:
    """What was written."""

    num_tasks: int
    num_rows: int


def adapt_files(
    folder: Path,
    inputs: list[str],
    out: Path,
    processes: int,
    verify: bool,
    report_progress: Advance,
    part_rows: int = PART_ROWS,
    with_support: bool = False,
) -> AdaptSummary:
    """Write the states of all tasks in the files `inputs` to `out`, `part_rows` rows or the
    longest task's in memory; `with_support` they carry their support rows. Raises DataError: a
    column holds what the model cannot take."""
    # One thread of torch a process; and none that a forked process would miss.
    torch.set_num_threads(1)
    model = load(folder, verify)
    with open_rows(inputs, model.config, True) as files:
        # Globs and folders, too, may hold the file that is to be written.
        check_replaceable(out, [("a file of SUPPORT", name) for name in files.names], True)
        # A missing column is reported before anything is read.
        model.encode(files.schema.empty_table(), files.names[0], with_label=True, with_task=True)
        if files.num_rows == 0:
            raise UserError(
                f"{', '.join(inputs)} has 0 rows: there is no task to adapt to. Give labelled rows"
            )
        # Each row is read once, and adapted to once.
        clock = ModelTimer(report_progress, 2 * files.num_rows)

        def read(scratch: Path) -> Iterator[Chunk]:
            num_parts = parts_for(files.num_rows, part_rows)
            place = scratch / "rows"
            spool = spool_rows(model, files, "support", place, num_parts, clock, True)
            return _read_chunks(spool, with_support)

        task_type = files.schema.field(model.config.columns.task).type
        return _write_states(model, read, task_type, out, processes, clock)


def renew_files(
    folder: Path, states: str, out: Path, processes: int, verify: bool, report_progress: Advance
) -> AdaptSummary:
    """Write to `out` the tasks of the states in the files `states`, adapted anew by the support
    rows that they carry, a few thousand states in memory. Raises UserError for one without."""
    torch.set_num_threads(1)
    model, files = load(folder, verify), RowFiles(states)
    check_replaceable(out, [("a file of --from", name) for name in files.names], True)
    missing = [name for name in STATE_COLUMNS if name not in files.schema.names]
    if missing:
        raise UserError(
            f"{files.names[0]} has no column {missing[0]}: --from takes the file that gmeta adapt "
            f"wrote, with {', '.join(STATE_COLUMNS)}. Name that"
        )
    if files.num_rows == 0:
        raise UserError(f"{states} has 0 states: there is nothing to renew. Name another file")
    task, state, num_rows = STATE_COLUMNS
    total = sum(pa.compute.sum(batch[num_rows]).as_py() or 0 for batch in files.batches([num_rows]))
    task_type, clock = files.schema.field(task).type, ModelTimer(report_progress, total)

    def read(_: Path) -> Iterator[Chunk]:
        for batch in files.batches([task, state], _STATES_AT_ONCE):
            yield from _unpack_states(model, batch[task], batch[state])

    return _write_states(model, read, task_type, out, processes, clock)


def _unpack_states(model: ServedModel, tasks: pa.Array, states: pa.Array) -> Iterator[Chunk]:
    """Yield the support rows that states carry in chunks of entire tasks."""
    held, lengths, first = list[EncodedColumns](), list[int](), 0
    for place, state in enumerate(states):
        try:
            rows = model.read_support(state.as_py())
        except UserError as error:
            raise UserError(f"task {tasks[place].as_py()!r}: {error}") from error
        # Told apart by their places: a caller may have adapted without naming the task.
        held.append(replace(rows, task_N=np.full(rows.num_rows, place)))
        lengths.append(rows.num_rows)
        if sum(lengths) >= CHUNK_ROWS or place == len(states) - 1:
            task_N = np.repeat(np.arange(first, place + 1), lengths)
            yield join_rows(held), pa.chunked_array([tasks.take(pa.array(task_N))]), True
            held, lengths, first = [], [], place + 1


def _write_states(
    model: ServedModel,
    read: Callable[[Path], Iterator[Chunk]],
    task_type: pa.DataType,
    out: Path,
    processes: int,
    clock: ModelTimer,
) -> AdaptSummary:
    """Write the states of the tasks of all chunks, which `read` finds with a folder for work."""
    with (
        # Forked first: reading Parquet starts threads.
        _worker_pool(model, processes) as workers,
        atomic_output(out) as (scratch, file),
    ):
        written = AdaptSummary(0, 0)
        columns = list(zip(STATE_COLUMNS, (task_type, pa.binary(), pa.int64()), strict=True))
        schema = pa.schema(columns, {MODEL_KEY: model.checksum})
        # The floats of a state are as good as random: nothing to compress.
        with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
            for states in workers(read(scratch)):
                writer.write_table(states.replace_schema_metadata(schema.metadata))
                num_rows = pa.compute.sum(states["rows"]).as_py()
                clock.advance_by(num_rows)
                num_tasks = written.num_tasks + states.num_rows
                written = AdaptSummary(num_tasks, written.num_rows + num_rows)
    return written


def _read_chunks(spool: TaskSpool, with_support: bool) -> Iterator[Chunk]:
    """Yield rows with their raw tasks in chunks of entire tasks, of CHUNK_ROWS rows or more."""
    for part in range(spool.num_parts):
        rows = spool.rows(part)
        if not rows.num_rows:
            continue
        # Stable: rows of a task stay in the order of the inputs, so that the states are the same
        # bits.
        order_N = np.argsort(rows.task_N, kind="stable")
        rows, raw_task_N = take_rows(rows, order_N), spool.raw_tasks(part).take(pa.array(order_N))
        ends = [*(np.flatnonzero(np.diff(rows.task_N)) + 1).tolist(), rows.num_rows]
        first = 0
        for end in ends:
            if end - first >= CHUNK_ROWS or end == rows.num_rows:
                chunk = split_rows(rows, [first, end - first])[1]
                # Not a slice, of which a pickle holds the entire column.
                yield chunk, raw_task_N.take(pa.array(np.arange(first, end))), with_support
                first = end


Work = Callable[[Iterator[Chunk]], Iterator[pa.Table]]


@contextmanager
def _worker_pool(model: ServedModel, processes: int) -> Iterator[Work]:
    """Yield a function that adapts the tasks of each chunk, in the order of the chunks."""
    if processes == 1:
        yield lambda chunks: (adapt_rows(model, *chunk) for chunk in chunks)
        return
    # Forked: they share the mapped tables and what is imported.
    begin = partial(_begin_worker, model, os.getpid())
    pool = ProcessPoolExecutor(processes, mp.get_context("fork"), initializer=begin)

    def work(chunks: Iterator[Chunk]) -> Iterator[pa.Table]:
        pending: deque[Future[pa.Table]] = deque()
        for chunk in chunks:
            pending.append(pool.submit(_adapt_chunk, *chunk))
            if len(pending) >= _CHUNKS_A_PROCESS * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        pool.submit(os.getpid).result()  # starts all processes
        yield work
    except BrokenProcessPool as error:
        raise GMetaError(
            "a process of gmeta adapt died, most likely since memory ran out: nothing was written. "
            "Run it again with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_HELD: list[ServedModel] = []  # of a worker process


def _begin_worker(model: ServedModel, parent: int) -> None:
    """Be a worker, which ends with its parent."""
    # Ctrl-C is for the parent. SIGTERM comes from the pool when another worker has died, and must
    # end this one whatever handler the program has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _HELD.append(model)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def _adapt_chunk(rows: EncodedColumns, raw_task_N: pa.ChunkedArray, with_support: bool) -> pa.Table:
    return adapt_rows(_HELD[0], rows, raw_task_N, with_support)
