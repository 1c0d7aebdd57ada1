"""What travels between a driver and its workers: pickled objects as rows of Spark, by bucket where
they are dealt.
"""

import pickle
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from metaio.errors import AccessError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PAYLOAD = "payload binary"
KEYED = "bucket int, payload binary"


def payload(found: Any) -> pa.RecordBatch:
    """Return an object as the one row of a batch of PAYLOAD."""
    return pa.record_batch({"payload": pa.array([pickle.dumps(found)], pa.binary())})


def keyed(found: list[tuple[int, Any]]) -> pa.RecordBatch:
    """Return objects, each with the bucket that it is for, as a batch of KEYED."""
    # A few large values instead of many small rows: Spark's shuffle just copies them.
    buckets = pa.array([bucket for bucket, _ in found], pa.int32())
    payloads = pa.array([pickle.dumps(each) for _, each in found], pa.binary())
    return pa.record_batch({"bucket": buckets, "payload": payloads})


def dealt(frame: "DataFrame", num_parts: int) -> "DataFrame":
    """Return a frame of KEYED, each bucket in one of `num_parts` parts, its rows together."""
    # The sort keeps a bucket's batches together where two share a task.
    return frame.repartition(num_parts, "bucket").sortWithinPartitions("bucket")


def keyed_payloads(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of batches of KEYED, objects still pickled: one is held at a time."""
    for batch in batches:
        yield from zip(batch["bucket"].to_pylist(), batch["payload"].to_pylist(), strict=True)


def collected(frame: "DataFrame") -> list[Any]:
    """Return the objects of a frame of PAYLOAD; an error of ours in a worker comes out as itself.

    Raises:
        DataError: a worker raised it.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        return [pickle.loads(row[0]) for row in frame.collect()]
    except (Py4JJavaError, PySparkException) as error:
        found = re.search(r"metaio\.errors\.(DataError|AccessError): (.*)", str(error))
        if found is None:
            raise
        kind = {"DataError": DataError, "AccessError": AccessError}[found.group(1)]
        raise kind(found.group(2).strip()) from error


def quoted(columns: list[str]) -> list[str]:
    """Return the names of columns as Spark takes them, whatever characters they have."""
    return [f"`{column}`" for column in columns]


def null_counts(frame: "DataFrame", columns: list[str]) -> tuple[int, dict[str, int]]:
    """Return the number of rows, and of the nulls in each column."""
    from pyspark.sql import functions

    # One pass over all columns; count() of a column leaves out its nulls.
    counts = [functions.count(functions.col(name)) for name in quoted(columns)]
    row = frame.agg(functions.count(functions.lit(1)), *counts).collect()[0]
    return row[0], {c: row[0] - n for c, n in zip(columns, row[1:], strict=True)}
