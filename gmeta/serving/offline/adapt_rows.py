"""From encoded, labelled rows of many tasks to a row a task: raw id, state, number of rows.

Shape suffixes: T tasks, N rows"""

import numpy as np
import pyarrow as pa

from gmeta.errors import UserError
from gmeta.serving.encoded_rows import EncodedColumns, join_rows, split_rows, take_rows
from gmeta.serving.served_model import ServedModel
from gmeta.serving.task_matching import cut_runs

STATE_COLUMNS = ("task", "state", "rows")
# Rows to adapt by in one go; the states of their tasks are in memory together.
CHUNK_ROWS = 8_192


def adapt_rows(
    model: ServedModel,
    rows: EncodedColumns,
    raw_task_N: pa.Array | pa.ChunkedArray,
    with_support: bool = False,
) -> pa.Table:
    """Return the columns of STATE_COLUMNS with a row a task, in the order of their first rows;
    `with_support` each state carries its support rows."""
    _, first_T, task_N, rows_T = np.unique(
        rows.task_N, return_index=True, return_inverse=True, return_counts=True
    )
    # np.unique sorts by the tasks' hashes.
    order_T = np.argsort(first_T, kind="stable")
    place_T = np.empty_like(order_T)
    place_T[order_T] = np.arange(len(order_T))
    ordered = take_rows(rows, np.argsort(place_T[task_N], kind="stable"))
    lengths_T = rows_T[order_T]
    tasks = raw_task_N.take(pa.array(first_T[order_T]))
    longest = int(lengths_T.max(initial=0))
    if model.refusal(longest):
        task = tasks[int(lengths_T.argmax())].as_py()
        raise UserError(model.refusal(longest, f"task {task!r}"))
    parts = split_rows(ordered, lengths_T.tolist())
    states: list[bytes] = [b""] * len(parts)
    # Tasks of like size share a batch: little of it is then padding.
    for chosen in cut_runs(np.argsort(lengths_T, kind="stable"), lengths_T):
        joined = join_rows([parts[place] for place in chosen])
        names = tasks.take(pa.array(chosen))
        chunk_states = model.adapt_encoded(joined, lengths_T[chosen].tolist(), names)
        for place, state in zip(chosen.tolist(), chunk_states, strict=True):
            states[place] = model.write_state(state, parts[place] if with_support else None)
    columns = (tasks, pa.array(states, pa.binary()), pa.array(lengths_T.astype(np.int64)))
    return pa.table(dict(zip(STATE_COLUMNS, columns, strict=True)))
