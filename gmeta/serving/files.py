"""Rows as whole Parquet files: what `gmeta predict` reads and writes."""

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.errors import UserError
from gmeta.files.whole import whole_file


def read_rows(url: str) -> pa.Table:
    """Return a whole Parquet file from a path or any fsspec URL.

    Raises:
        UserError: it does not exist, or is no Parquet file.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url)
        with fs.open(path) as file:
            return pq.read_table(file)
    except FileNotFoundError as error:
        raise UserError(f"{url} does not exist. Check the path") from error
    # ValueError and ImportError: fsspec knows no such protocol, or lacks its package.
    except (pa.ArrowException, OSError, ValueError, ImportError) as error:
        raise UserError(
            f"{url} cannot be read as Parquet: {str(error).splitlines()[0].rstrip('.')}. "
            "Give a Parquet file that is whole"
        ) from error


def write_rows(table: pa.Table, out: Path) -> None:
    """Write a Parquet file whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as file:
        pq.write_table(table, file)
