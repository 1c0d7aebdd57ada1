"""What travels between a driver and its workers: pickled objects as rows of Spark, by bucket where
they are dealt."""

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from metaio import errors
from metaio.errors import AccessError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BatchFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
PAYLOAD = "payload binary"
KEYED = "bucket int, payload binary"


def make_payload_batch(found: Any) -> pa.RecordBatch:
    """Return an object as the one row of a batch of PAYLOAD."""
    return pa.record_batch({"payload": pa.array([pickle.dumps(found)], pa.binary())})


def make_keyed_batch(found: list[tuple[int, Any]]) -> pa.RecordBatch:
    """Return objects, each with the bucket that it is for, as a batch of KEYED."""
    # A few large values instead of many small rows: Spark's shuffle just copies them.
    buckets = pa.array([bucket for bucket, _ in found], pa.int32())
    payloads = pa.array([pickle.dumps(each) for _, each in found], pa.binary())
    return pa.record_batch({"bucket": buckets, "payload": payloads})


def repartition_by_bucket(frame: "DataFrame", num_parts: int) -> "DataFrame":
    """Return a frame of KEYED, each bucket in one of `num_parts` parts, its rows together."""
    # The sort keeps a bucket's batches together where two share a task.
    return frame.repartition(num_parts, "bucket").sortWithinPartitions("bucket")


def group_by_bucket(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Iterator[Any]]]:
    """Yield each bucket of batches of KEYED that were dealt, with its objects one at a time."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for bucket, own in groupby(rows, key=itemgetter("bucket")):
        yield bucket, (pickle.loads(row["payload"]) for row in own)


@contextmanager
def translate_failures() -> Iterator[None]:
    """Turn a failure in Spark into an error of ours; ours that a worker raised are raised as they
    are. Raises MetaIOError: a worker raised it. Raises AccessError: Spark failed for another
    reason."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        for name, message in re.findall(r"metaio\.errors\.(\w+): (.*)", text)[:1]:
            raise getattr(errors, name)(message.strip()) from error
        raise AccessError(
            f"Spark failed: {errors.to_one_line(_find_reason(text)).rstrip('.')}. Its log says "
            "more; mend the "
            "input, or give Spark what it lacks, and run again"
        ) from error


def _find_reason(text: str) -> str:
    """Return the most telling line of an error of Spark.

    >>> _reason("An error occurred while calling o1.x.\\n: java.io.IOException: no\\n\\tat x.y")
    'java.io.IOException: no'
    >>> _reason("A worker: Traceback (most recent call last):\\n  File ...\\nOSError: no\\n")
    'OSError: no'"""
    lines = text.partition("Traceback (most recent call last)")[2].splitlines()[1:]
    of_python = (line for line in lines if line[:1].strip())
    of_java = re.findall(r"^: (.*)", text, re.MULTILINE)
    return next(of_python, None) or (of_java or text.splitlines() or ["no reason given"])[0]


def collect_rows(frame: "DataFrame") -> list[Any]:
    """Return the rows of a frame; see translate_failures."""
    with translate_failures():
        return list(frame.collect())


def collect_objects(frame: "DataFrame") -> list[Any]:
    """Return the objects of a frame of PAYLOAD; see translate_failures."""
    return [pickle.loads(row[0]) for row in collect_rows(frame)]


def quote_columns(columns: list[str]) -> list[str]:
    """Return the names of columns as Spark takes them, whatever characters they have."""
    return ["`" + column.replace("`", "``") + "`" for column in columns]


def map_batches(
    frame: "DataFrame", columns: list[str], function: BatchFunction, schema: str = PAYLOAD
) -> "DataFrame":
    """Return the frame of what a function makes of the batches of these columns."""
    from pyspark.sql import functions

    def map_named_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(pa.RecordBatch.from_arrays(b.columns, names=columns) for b in batches)

    # Under other names on the way: mapInArrow does not find its own column `a.b`.
    chosen = [functions.col(name).alias(f"c{i}") for i, name in enumerate(quote_columns(columns))]
    return frame.select(*chosen).mapInArrow(map_named_batches, schema)


def count_nulls(frame: "DataFrame", columns: list[str]) -> tuple[int, dict[str, int]]:
    """Return the number of rows, and of the nulls in each column."""
    from pyspark.sql import functions

    # One pass over all columns; count() of a column leaves out its nulls.
    counts = [functions.count(functions.col(name)) for name in quote_columns(columns)]
    row = collect_rows(frame.agg(functions.count(functions.lit(1)), *counts))[0]
    return row[0], {c: row[0] - n for c, n in zip(columns, row[1:], strict=True)}
