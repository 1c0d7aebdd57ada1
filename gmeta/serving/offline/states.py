"""From tables of labelled rows to their tasks' states: in this process, or in a Spark job."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gmeta.serving.model_loader import load
from gmeta.serving.offline.adapt_rows import CHUNK_ROWS, adapt_rows
from gmeta.serving.row_encoders import as_table
from gmeta.serving.served_model import ServedModel


def adapt_tasks(model: ServedModel, support: pa.Table) -> pa.Table:
    """Return STATE_COLUMNS with a row for each task of `support`, by its first row's place."""
    rows = model.encode(support, "support", with_label=True, with_task=True)
    return adapt_rows(model, rows, support[model.config.columns.task])


def group_tasks(parts: Iterable[pa.Table], task: str, chunk_rows: int) -> Iterator[pa.Table]:
    """Yield tables of `chunk_rows` rows or more, of whole tasks: their rows must stand together."""
    held: list[pa.Table] = []
    num_rows = 0
    for part in parts:
        held.append(part)
        num_rows += part.num_rows
        if num_rows < chunk_rows:
            continue
        joined = pa.concat_tables(held)
        # The last task may go on in the next part.
        column = joined[task]
        # pc.index finds no null; encode refuses it in any case.
        end = pc.index(column, column[-1]).as_py() if column[-1].is_valid else num_rows
        if end > 0:
            yield joined.slice(0, end)
        held = [joined.slice(end)]
        num_rows -= end
    if num_rows:
        yield pa.concat_tables(held)


def adapt_partition(model: str | Path) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return a function for Spark's `mapInPandas` and `mapInArrow`, which adapts the tasks of a
    partition; its result has STATE_COLUMNS, of the schema "task TASKTYPE, state binary, rows long".

    All rows of a task must stand together in one partition. The folder `model` must be where each
    executor can read it.

        rows = spark.read.parquet("support.parquet")
        rows = rows.repartition("user").sortWithinPartitions("user")
        rows.mapInPandas(adapt_partition("/exports/clicks"), "task long, state binary, rows long")
    """

    def adapt(batches: Iterable[Any]) -> Iterator[Any]:
        # Each partition loads the model: to compare checksums would read every table each time.
        served, remaining = load(model, verify=False), iter(batches)
        first = next(remaining, None)
        if first is None:
            return  # an empty partition
        tables = (
            # What pandas says of its index differs from batch to batch.
            as_table(batch, "support").replace_schema_metadata(None)
            for batch in chain([first], remaining)
        )
        for chunk in group_tasks(tables, served.config.columns.task, CHUNK_ROWS):
            states = adapt_tasks(served, chunk)
            if isinstance(first, pa.RecordBatch):
                yield from states.combine_chunks().to_batches()
            else:
                yield states.to_pandas()

    return adapt
