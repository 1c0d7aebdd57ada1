"""`gmeta adapt`: the tasks of Parquet files of any size, to one Parquet file of their states.

DuckDB sorts the rows by task, on disk where they are too many for memory; chunks of whole tasks go
to processes that share the mapped tables, and the states are written in the order of the tasks.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gmeta.errors import GMetaError, UserError
from gmeta.serving.columns import select
from gmeta.serving.load import load
from gmeta.serving.model import ServedModel
from gmeta.serving.offline.states import CHUNK_ROWS, adapt_tasks, whole_tasks
from metaio.errors import DataError, shown
from metaio.format.destination import flush_to_disk, folder_of_one_writer
from metaio.prepare.inputs import Inputs, expand

_SORT_MEMORY = "1GiB"  # then DuckDB sorts on disk, beside the output
_BATCH_ROWS = 65_536
_CHUNKS_A_PROCESS = 2  # under way: one that is computed, one that waits
_LOOK_EVERY_S = 1.0
_FILE = "file of the row"
MODEL_KEY = b"gmeta.model"  # in the file's metadata: the checksum of the model

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Adapted:
    """What was written."""

    num_tasks: int
    num_rows: int


def adapt_files(
    folder: Path, inputs: list[str], out: Path, processes: int, verify: bool, tell: Tell
) -> Adapted:
    """Write the states of all tasks in the Parquet files `inputs` (paths, globs, folders, URLs) to
    `out`, which appears whole or not at all; `tell` is told of the rows done and of all.

    Raises:
        UserError: there is no model, a column is missing, or an input is no Parquet file.
        DataError: an input does not exist, or a column holds what the model cannot take.
        GMetaError: the model is damaged, or a process died.
    """
    # One thread of torch a process; and none that a forked process would miss.
    torch.set_num_threads(1)
    model = load(folder, verify)
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        # Forked first: DuckDB has threads.
        _workers(model, processes) as workers,
        folder_of_one_writer(out.parent / f".{out.name}.partial", str(out)) as partial,
    ):
        found = expand(inputs, partial)
        columns = model.columns_read(with_label=True)
        total = _check_files(found, columns)
        if total == 0:
            raise UserError(
                f"{', '.join(inputs)} has 0 rows: there is no task to adapt to. Give labelled rows"
            )
        task, file = model.config.columns.task, partial / "states.parquet"
        parts = _sorted_rows(found, task, columns, partial / "sort")
        written = Adapted(0, 0)
        with _StatesFile(file, model.checksum) as states_file:
            for states in workers(whole_tasks(parts, task, CHUNK_ROWS)):
                states_file.write(states)
                num_rows = written.num_rows + pa.compute.sum(states["rows"]).as_py()
                written = Adapted(written.num_tasks + states.num_rows, num_rows)
                tell(num_rows, total)
        flush_to_disk([file])
        file.replace(out)
        flush_to_disk([out.parent])
    return written


class _StatesFile:
    """A Parquet file of states, opened when the first ones come."""

    def __init__(self, file: Path, checksum: str) -> None:
        self._file = file
        self._checksum = checksum
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, states: pa.Table) -> None:
        """Write a row group."""
        if self._writer is None:
            schema = states.schema.with_metadata({MODEL_KEY: self._checksum})
            # The floats of a state are as good as random: nothing to compress.
            self._writer = pq.ParquetWriter(
                self._file, schema, compression="none", use_dictionary=False
            )
        self._writer.write_table(states.replace_schema_metadata(self._writer.schema.metadata))


def _check_files(inputs: Inputs, columns: list[str]) -> int:
    """Return how many rows the files have.

    Raises:
        UserError: a column is missing.
        DataError: a file is no Parquet, or has a column of another type than the first one.
    """
    num_rows, first = 0, None
    for name in inputs.names:
        try:
            with fsspec.open(name) as file:
                told = pq.read_metadata(file)
                schema = told.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"input {name} cannot be read as Parquet: "
                f"{shown(str(error).splitlines()[0]).rstrip('.')}. Give a Parquet file that is "
                "whole"
            ) from error
        found = select(schema.empty_table(), columns, [], name).schema
        first = first or found
        for column in columns:
            # 7 and "7" are different tasks, and different ids.
            if found.field(column).type != first.field(column).type:
                raise DataError(
                    f"column {column} is {found.field(column).type} in {name} and "
                    f"{first.field(column).type} in {inputs.names[0]}; one type is needed. Cast one"
                )
        num_rows += told.num_rows
    return num_rows


def _sorted_rows(inputs: Inputs, task: str, columns: list[str], folder: Path) -> Iterator[pa.Table]:
    """Yield the rows sorted by task and, within one, by their place in the inputs: the same states
    whatever the number of processes. What memory cannot hold is sorted in `folder`.
    """
    names, asked = ", ".join(map(_text, inputs.names)), ", ".join(map(_name, columns))
    with duckdb.connect() as connection:
        for fs in inputs.file_systems:
            connection.register_filesystem(fs)
        connection.execute(f"SET memory_limit = '{_SORT_MEMORY}'")
        connection.execute(f"SET temp_directory = {_text(str(folder))}")
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET enable_progress_bar = false")  # gmeta has its own
        try:
            rows = connection.sql(
                f"SELECT {asked} FROM read_parquet([{names}], file_row_number = true, "
                f"filename = {_text(_FILE)}) ORDER BY {_name(task)}, {_name(_FILE)}, "
                "file_row_number"
            )
            for batch in rows.to_arrow_reader(_BATCH_ROWS):
                yield pa.table(batch)
        except (duckdb.Error, pa.ArrowException) as error:
            raise DataError(
                f"the support rows cannot be sorted: {shown(str(error).splitlines()[0], 300)}. "
                "Free space beside the output, and see that all files are whole"
            ) from error


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


Work = Callable[[Iterator[pa.Table]], Iterator[pa.Table]]


@contextmanager
def _workers(model: ServedModel, processes: int) -> Iterator[Work]:
    """Yield a function that adapts the tasks of each chunk, in the order of the chunks."""
    if processes == 1:
        yield lambda chunks: (adapt_tasks(model, chunk) for chunk in chunks)
        return
    # Forked: they share the mapped tables and what is imported.
    pool = ProcessPoolExecutor(
        processes, mp.get_context("fork"), initializer=_begin, initargs=(model, os.getpid())
    )

    def work(chunks: Iterator[pa.Table]) -> Iterator[pa.Table]:
        pending: deque[Future[bytes]] = deque()
        for chunk in chunks:
            pending.append(pool.submit(_adapt_chunk, _packed(chunk)))
            if len(pending) >= _CHUNKS_A_PROCESS * processes:
                yield _unpacked(pending.popleft().result())
        while pending:
            yield _unpacked(pending.popleft().result())

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


def _begin(model: ServedModel, parent: int) -> None:
    """Be a worker: Ctrl-C is the parent's, and its end is the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _HELD.append(model)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def _adapt_chunk(packed: bytes) -> bytes:
    return _packed(adapt_tasks(_HELD[0], _unpacked(packed)))


def _packed(table: pa.Table) -> bytes:
    """Return a table as bytes. A pickled slice would be the whole that it is a slice of."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _unpacked(packed: bytes) -> pa.Table:
    return pa.ipc.open_stream(packed).read_all()
