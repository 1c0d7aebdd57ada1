"""The logs that the metaio benchmarks run on: 26 id columns, 2 lists, 13 floats; users with 5 to 75
rows.

Ids are skewed like click logs; tables have 10 to a million rows. Shared by metaio_prepare and
metaio_reader."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema

IDS = tuple(f"id{i}" for i in range(26))
LISTS = ("tags", "history")
FLOATS = tuple(f"x{i}" for i in range(13))
CARDINALITIES = tuple(10 ** (1 + i % 6) for i in range(26))
_CHUNK_ROWS = 500_000
_MEAN_ROWS_OF_USER = 40


def skewed(rng: np.random.Generator, size: int, cardinality: int) -> np.ndarray:
    """Ids of which a few are used most."""
    return np.minimum((cardinality * rng.random(size) ** 3).astype(np.int64), cardinality - 1)


def log_chunk(rng: np.random.Generator, rows: int, users: int) -> pa.Table:
    """Random rows in the order of a log: by nothing."""
    columns: dict[str, pa.Array] = {
        "user": pa.array(rng.integers(0, users, rows)),
        "ts": pa.array(rng.integers(0, 10**9, rows)),
        "click": pa.array(rng.integers(0, 2, rows).astype(np.int8)),
    }
    for name, cardinality in zip(IDS, CARDINALITIES, strict=True):
        columns[name] = pa.array(skewed(rng, rows, cardinality))
    for name in LISTS:
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, rows))]).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, skewed(rng, int(offsets[-1]), 10_000))
    for name in FLOATS:
        columns[name] = pa.array(rng.standard_normal(rows, dtype=np.float32))
    return pa.table(columns)


def write_logs(path: Path, rows: int) -> None:
    """One Parquet file of `rows` rows, seeded."""
    rng = np.random.default_rng(0)
    users = max(rows // _MEAN_ROWS_OF_USER, 1)
    schema = log_chunk(rng, 1, users).schema
    with pq.ParquetWriter(path, schema, compression="lz4", use_dictionary=False) as writer:
        # Chunk by chunk: 20 million rows would take several gigabytes at once.
        for start in range(0, rows, _CHUNK_ROWS):
            writer.write_table(log_chunk(rng, min(_CHUNK_ROWS, rows - start), users))


def logs_schema(min_rows: int = 6) -> Schema:
    """All ids hashed into tables of their cardinality; the last 5 rows by time are the query."""
    single = [
        {"column": name, "hash": cardinality + 2}
        for name, cardinality in zip(IDS, CARDINALITIES, strict=True)
    ]
    return parse_schema(
        {
            "task": {"column": "user"},
            "label": {"column": "click"},
            "time": {"column": "ts"},
            "single": single,
            "multi": [{"column": name, "hash": 10_002} for name in LISTS],
            "dense": [{"column": name} for name in FLOATS],
            "episodes": {"by": "last", "query_rows": 5, "min_rows": min_rows, "max_rows": 4_096},
        }
    )
