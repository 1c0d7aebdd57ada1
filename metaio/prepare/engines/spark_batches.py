"""Moves pickled objects between Spark's driver and workers, as rows that are dealt by bucket."""

import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from metaio import errors
from metaio.errors import AccessError, DataError
from metaio.prepare.schema.schema import Schema
from metaio.prepare.source.file_groups import FileGroup

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BatchFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
PAYLOAD = "payload binary"
KEYED = "bucket int, payload binary"


def make_payload_batch(found: Any) -> pa.RecordBatch:
    """Return an object as the one row of a batch of PAYLOAD."""
    return pa.record_batch({"payload": pa.array([pickle.dumps(found)], pa.binary())})


def make_keyed_batch(found: list[tuple[int, Any]]) -> pa.RecordBatch:
    """Return objects, each with its bucket, as a batch of KEYED."""
    # A few large values, not many small rows: Spark's shuffle then just copies bytes.
    buckets = pa.array([bucket for bucket, _ in found], pa.int32())
    payloads = pa.array([pickle.dumps(each) for _, each in found], pa.binary())
    return pa.record_batch({"bucket": buckets, "payload": payloads})


def repartition_by_bucket(frame: "DataFrame", num_parts: int) -> "DataFrame":
    """Return a frame of KEYED in `num_parts` parts, the rows of each bucket together in one."""
    # Two buckets may share a part: the sort separates their rows.
    return frame.repartition(num_parts, "bucket").sortWithinPartitions("bucket")


def group_by_bucket(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Iterator[Any]]]:
    """Yield each bucket of dealt batches of KEYED, with its objects one at a time."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for bucket, own in groupby(rows, key=itemgetter("bucket")):
        yield bucket, (pickle.loads(row["payload"]) for row in own)


@contextmanager
def translate_failures() -> Iterator[None]:
    """Raise a worker's own MetaIOError, and AccessError for other failures of Spark."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        # Spark passes a worker's error on as the text of its traceback.
        for name, message in re.findall(r"metaio\.errors\.(\w+): (.*)", text)[:1]:
            raise getattr(errors, name)(message.strip()) from error
        raise AccessError(
            f"Spark failed: {errors.to_one_line(_find_reason(text)).rstrip('.')}. Its log says "
            "more; mend the input, or give Spark what it lacks, and run again"
        ) from error


def _to_spark_type(kind: str) -> str:
    """Return DuckDB's name of a type as Spark has it.

    >>> _to_spark_type("VARCHAR"), _to_spark_type("BIGINT[]")
    ('string', 'array<bigint>')"""
    if kind.endswith("[]"):
        return f"array<{_to_spark_type(kind[:-2])}>"
    return {"VARCHAR": "string", "INTEGER": "int"}.get(kind, kind.lower())


def _find_reason(text: str) -> str:
    """Return the most telling line of an error of Spark.

    >>> _find_reason("An error occurred in o1.x.\\n: java.io.IOException: no\\n\\tat x.y")
    'java.io.IOException: no'
    >>> _find_reason("A worker: Traceback (most recent call last):\\n  File ...\\nOSError: no\\n")
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
    """Return column names as Spark takes them, whatever characters they have."""
    return ["`" + column.replace("`", "``") + "`" for column in columns]


def map_batches(
    frame: "DataFrame", columns: list[str], function: BatchFunction, schema: str = PAYLOAD
) -> "DataFrame":
    """Return the frame that `function` makes of the batches of these columns."""
    from pyspark.sql import functions

    def map_named_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(pa.RecordBatch.from_arrays(b.columns, names=columns) for b in batches)

    # Renamed on the way: mapInArrow does not find a column called `a.b`.
    chosen = [functions.col(name).alias(f"c{i}") for i, name in enumerate(quote_columns(columns))]
    return frame.select(*chosen).mapInArrow(map_named_batches, schema)


def count_nulls(frame: "DataFrame", columns: list[str]) -> tuple[int, dict[str, int]]:
    """Return the number of rows, and of the nulls in each column."""
    from pyspark.sql import functions

    # One pass over all columns; count() of a column leaves out its nulls.
    counts = [functions.count(functions.col(name)) for name in quote_columns(columns)]
    row = collect_rows(frame.agg(functions.count(functions.lit(1)), *counts))[0]
    return row[0], {c: row[0] - n for c, n in zip(columns, row[1:], strict=True)}


@translate_failures()
def read_frame(session: "SparkSession", groups: list[FileGroup], schema: Schema) -> "DataFrame":
    """Return the used columns of all files; raise DataError where Spark cannot read them."""
    frames = [_read_group(session, group, schema) for group in groups]
    return reduce(lambda one, other: one.union(other), frames)


def _read_group(session: "SparkSession", group: FileGroup, schema: Schema) -> "DataFrame":
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions

    names = group.names
    # Hadoop takes a bare path for one of its default file system, and calls S3 s3a.
    urls = [name if "://" in name else f"file://{os.path.abspath(name)}" for name in names]
    urls = [f"s3a{url[2:]}" if url.startswith("s3://") else url for url in urls]
    try:
        frame = session.read.parquet(*urls)
        own = [name for name in schema.columns if name not in group.absent]
        chosen = dict(zip(own, map(functions.col, quote_columns(own)), strict=True))
        chosen |= {name: functions.lit(None) for name in group.absent}
        for name, kind in {**group.absent, **group.casts}.items():
            chosen[name] = chosen[name].cast(_to_spark_type(kind))
        return frame.select(*(chosen[name].alias(name) for name in schema.columns))
    except AnalysisException as error:
        raise DataError(
            f"Spark cannot read {urls[0]}: {str(error).splitlines()[0]} Correct the path, and "
            "write columns that stand in the names of folders into the files"
        ) from error
