"""Predictions for files of any size: encoded rows are spooled by task and predicted part by part.

Shape suffixes: T tasks, N rows"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.serving.bulk.row_files import RowFiles, atomic_output, open_writer
from gmeta.serving.bulk.task_spool import (
    PART_ROWS,
    Advance,
    ModelTimer,
    TaskSpool,
    parts_for,
    spool_rows,
)
from gmeta.serving.outputs import BEFORE, PREDICTION, Output, list_outputs
from gmeta.serving.row_encoders import check_task_kinds
from gmeta.serving.served_model import ServedModel
from gmeta.serving.task_matching import refuse_without_support

SUPPORT_ROWS = "support_rows"
Records = npt.NDArray[np.void]  # an entry a query row, with a field for each output


def schema_of(outputs: Sequence[Output]) -> pa.Schema:
    """Return the columns beside the query's: outputs, and how many support rows a task had."""
    fields = [(output.name, pa.float32()) for output in outputs]
    return pa.schema([*fields, (SUPPORT_ROWS, pa.int64())])


@dataclass(frozen=True)
class PredictionSummary:
    """What was written; `seconds` are the model's own, without reading and writing."""

    num_rows: int
    rows_without_support: int
    seconds: float


def predict_files(
    served: ServedModel,
    support: RowFiles,
    query: RowFiles,
    out: Path,
    allow_no_support: bool,
    advance: Advance,
    part_rows: int = PART_ROWS,
) -> PredictionSummary:
    """Write the query's rows in their order, with the columns of schema_of, to `out`; about
    `part_rows` rows, at least those of the longest task, are in memory."""
    for rows, what in ((support, "support"), (query, "query")):
        # A missing column is reported before anything is read.
        served.encode(rows.schema.empty_table(), what, with_label=rows is support, with_task=True)
    heads = support.schema.empty_table(), query.schema.empty_table()
    check_task_kinds(served.config.columns.task, *heads)
    served.choose_threads()
    # Query rows are read, predicted and written; support rows are only read.
    clock = ModelTimer(advance, support.num_rows + 3 * query.num_rows)
    # Tasks are dealt to parts by their hash, so both sides of one are in the same part.
    num_parts = parts_for(support.num_rows + query.num_rows, part_rows)
    with atomic_output(out) as (folder, written):
        supports = spool_rows(served, support, "support", folder / "support", num_parts, clock)
        queries = spool_rows(served, query, "query", folder / "query", num_parts, clock)
        if not allow_no_support:
            _check_support(supports, queries)
        output = schema_of(list_outputs(served.config))
        # Not to_pandas_dtype: releases of pyarrow before 24 want pandas for it.
        kinds = np.dtype([(one.name, pa.array([], one.type).to_numpy().dtype) for one in output])
        # Parts come by task, the file by row: each prediction is put where its row stands.
        found_N = _reserve_array(folder / "predictions", kinds, query.num_rows)
        without = _predict_parts(served, supports, queries, found_N, clock)
        _write(query, output, found_N, written, out.suffix, clock)
    return PredictionSummary(query.num_rows, without, clock.seconds)


def _reserve_array(path: Path, kinds: np.dtype[np.void], num_rows: int) -> Records:
    """Return an array in a new file whose disk space is reserved. Raise OSError."""
    shape = (max(num_rows, 1),)  # a file of no byte cannot be mapped
    with path.open("wb") as file:
        # Writing into a hole of the mapped file ends the process by a signal once the disk is full.
        os.posix_fallocate(file.fileno(), 0, shape[0] * kinds.itemsize)
    return np.memmap(path, kinds, "r+", shape=shape)


def _check_support(support: TaskSpool, query: TaskSpool) -> None:
    """Raise UserError where a task of the query has no support rows."""
    num_tasks, without, first = 0, 0, np.iinfo(np.int64).max
    for part in range(query.num_parts):
        task_N, place_N = query.tasks(part)
        tasks, first_T = np.unique(task_N, return_index=True)
        lacks_T = ~np.isin(tasks, support.tasks(part)[0])
        num_tasks, without = num_tasks + len(tasks), without + int(lacks_T.sum())
        # Parts go by hash: the first row of all parts is what a reader can find.
        first = min([first, *place_N[first_T[lacks_T]].tolist()])
    if without:
        refuse_without_support(without, num_tasks, int(first))


def _predict_parts(
    served: ServedModel, support: TaskSpool, query: TaskSpool, found_N: Records, clock: ModelTimer
) -> int:
    """Fill in the predictions of each query row; return how many have no support rows."""
    without = 0
    for part in range(query.num_parts):
        _, place_N = query.tasks(part)
        if not len(place_N):
            continue
        with clock:
            sides = support.rows(part), query.rows(part)
            predictions = served.predict_tasks_encoded(*sides, True, place_N)
        of = {PREDICTION: predictions.after_N, BEFORE: predictions.before_N}
        for output in list_outputs(served.config):
            found_N[output.name][place_N] = output.values_N(of[output.kind]).numpy()
        found_N[SUPPORT_ROWS][place_N] = predictions.support_rows_N.numpy()
        without += int((predictions.support_rows_N == 0).sum())
        clock.advance_by(len(place_N))
    return without


def _write(
    query: RowFiles, output: pa.Schema, found_N: Records, path: Path, suffix: str, clock: ModelTimer
) -> None:
    schema, first = query.schema, 0
    for field in output:
        schema = schema.append(field)
    with open_writer(path, schema, suffix) as writer:
        for batch in query.batches():
            stop = first + batch.num_rows
            fields_N = (found_N[name][first:stop] for name in output.names)
            # A field of records is strided, which Arrow does not take.
            predicted = [pa.array(np.ascontiguousarray(field_N)) for field_N in fields_N]
            columns = [*batch.columns, *predicted]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            clock.advance_by(batch.num_rows)
            first = stop
