"""Frames in and out: pandas, polars and Arrow."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.errors import UserError

# A pandas or polars DataFrame, an Arrow table, or whatever Arrow reads as one.
Frame: TypeAlias = Any
Log: TypeAlias = str | Path | Sequence[str | Path] | Frame


def list_inputs(log: Log, folder: Path) -> list[str]:
    """Return the paths of a log; a frame is written into `folder` first."""
    if isinstance(log, str | Path):
        return [str(log)]
    if isinstance(log, list | tuple):
        return [str(path) for path in log]
    try:
        table = log if isinstance(log, pa.Table) else pa.table(log)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise UserError(
            f"a log of type {type(log).__name__} cannot be read as columns: "
            f"{str(error).splitlines()[0]}. Give a path, several of them, or a pandas, polars or "
            "Arrow frame"
        ) from error
    path = folder / "log.parquet"
    pq.write_table(table.replace_schema_metadata(None), path)
    return [str(path)]


def make_frame(columns: dict[str, list[Any]]) -> Frame:
    """Return columns as a pandas DataFrame where pandas is installed, else as an Arrow table."""
    table = pa.table(columns)
    return table.to_pandas() if find_spec("pandas") else table
