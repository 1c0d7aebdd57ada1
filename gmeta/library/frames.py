"""Frames in and out: pandas, polars and Arrow."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.errors import UserError
from metaio.prepare.schema.values import decode_views

UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
# A pandas or polars DataFrame, an Arrow table, or whatever Arrow reads as one.
Frame: TypeAlias = Any
Log: TypeAlias = str | Path | Sequence[str | Path] | Frame


def list_inputs(log: Log, folder: Path) -> list[str]:
    """Return the paths of a log; a frame is written into `folder` first."""
    if isinstance(log, str | Path):
        return [str(log)]
    if isinstance(log, list | tuple) and all(isinstance(path, str | Path) for path in log):
        return [str(path) for path in log]
    path = folder / "log.parquet"
    try:
        table = _without_row_numbers(log if isinstance(log, pa.Table) else pa.table(log))
        columns = [decode_views(column) for column in table.columns]
        pq.write_table(pa.table(columns, names=table.column_names), path)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise UserError(
            f"a log of type {type(log).__name__} cannot be read as columns: "
            f"{str(error).splitlines()[0]}. Give a path, several of them, or a pandas, polars or "
            "Arrow frame"
        ) from error
    return [str(path)]


def _without_row_numbers(table: pa.Table) -> pa.Table:
    """Return a table without the index of a pandas DataFrame that has no name: no column of the
    log, it would become a feature as soon as rows were filtered."""
    return table.select([name for name in table.column_names if not UNNAMED_INDEX.fullmatch(name)])


def make_frame(columns: dict[str, list[Any]]) -> Frame:
    """Return columns as a pandas DataFrame where pandas is installed, else as an Arrow table."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    table = pa.table(
        # Intervals of which none is known are numbers, too.
        {
            name: one if one.null_count < len(one) else one.cast("double")
            for name, one in arrays.items()
        }
    )
    return table.to_pandas() if find_spec("pandas") else table
