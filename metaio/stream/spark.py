"""prepare --extend on a cluster: the same increment to the byte. Spark reads, shuffles and places
the work; the driver holds the tables, and one record of each distinct value of the window.

Looking, encoding, joining and files are the functions that the one-machine engine calls. Workers
find what they need of the state in its files, by mapping: the stream lies where all of them see it.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from metaio.errors import AccessError, DataError
from metaio.format.destination import flush_to_disk
from metaio.format.writer import DatasetWriter
from metaio.prepare.encode import Encoder
from metaio.prepare.encoded_rows import EncodedRows, joined
from metaio.prepare.in_order import Progress
from metaio.prepare.job import PrepareOptions, ShardUse, TableUse
from metaio.prepare.schema import Schema
from metaio.prepare.source import DuckSource, refuse_counts
from metaio.prepare.spark_payloads import (
    KEYED,
    PAYLOAD,
    by_bucket,
    collected,
    dealt,
    failures_told,
    keyed,
    mapped,
    null_counts,
    payload,
    quoted,
)
from metaio.prepare.spool import split_by_bucket
from metaio.stream.engine import Bucket, Window, Written, adopt_buckets, write_bucket
from metaio.stream.inputs import InputFile, described
from metaio.stream.numbering import Numbering, Occurrences, merged
from metaio.stream.state import mapped_tables
from metaio.stream.task_rows import TaskRows, TaskRowsWriter
from metaio.stream.window import Look, Looking, encoded, look_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_Batches = Iterator[pa.RecordBatch]
# The bucket of counts, which are not occurrences of a value and go to the driver as they are.
_COUNTS = -1


def on_spark(
    session: "SparkSession",
) -> Callable[[DuckSource, Schema, PrepareOptions], "_Spark"]:
    """Return the engine for `metaio.stream.extend.extend(..., engine_of=...)`.

    The stream and the tables, which are Parquet files, must stand where every worker sees them
    under the same path or URL. The options' memory and threads are Spark's own matter.
    """

    def engine_of(source: DuckSource, schema: Schema, options: PrepareOptions) -> _Spark:
        return _Spark(session, source, schema)

    return engine_of


class _Spark:
    """The rows of a source as a frame: the source itself reads no more than the files' schemas."""

    def __init__(self, session: "SparkSession", source: DuckSource, schema: Schema) -> None:
        """Raise DataError for files that Spark does not read, and for a transform."""
        if schema.transform is not None:
            raise DataError(
                f"the stream's schema has [transform] with {schema.transform.function!r}, which "
                "runs on one machine. Leave --spark out"
            )
        self._session, self._names = session, source.names
        self._rows = _frame(session, source.names, schema)
        self._parts = int(session.conf.get("spark.sql.shuffle.partitions") or 200)

    def described(self, names: list[str]) -> list[InputFile]:
        """Return the files with their hashes, which the executors compute."""

        def describe(batches: _Batches) -> _Batches:
            for index in _ids(batches):
                yield payload(described(names[index]))

        found = collected(self._range(len(names)).mapInArrow(describe, PAYLOAD))
        by_name = {file.name: file for file in found}
        return [by_name[name] for name in names]

    def look(self, looking: Looking, tell: Progress) -> Look:
        """Return what all rows hold, counted by the executors and added up here."""
        total, nulls = null_counts(self._rows, looking.schema.columns)
        refuse_counts(looking.schema, self._names, total, nulls)
        tell("looking", 0, total)
        rows = mapped(self._rows, looking.schema.columns, _looker(looking, self._parts), KEYED)
        # The occurrences of a value meet in one part, so that the driver gets it once.
        found = collected(dealt(rows, self._parts).mapInArrow(_merger(looking), PAYLOAD))
        look, no_times = Look(), np.zeros(0, np.int64)
        for table, least in looking.admissions.items():
            no_values = pa.array([], looking.value_types[table])
            look.seen[table] = [Occurrences.of(no_values, no_times, least)]
        for part in found:
            look.add(part, looking.admissions)
        tell("looking", total, total)
        return look

    def write(
        self,
        window: Window,
        tables: dict[str, Numbering],
        writer: DatasetWriter,
        state_folder: Path,
        tell: Progress,
    ) -> Written:
        """Have the executors encode all rows and write a shard for each bucket."""
        job = window.job
        # Workers have the values from the state: a vocabulary may be as large as their memory.
        window = replace(window, job=replace(job, fitted=replace(job.fitted, vocabularies={})))
        num_rows = {name: table.num_rows for name, table in tables.items()}
        parts = writer.folder / ".parts"
        parts.mkdir()
        num_buckets = sum(job.plan.buckets_of_split)
        encode = _encoder(window, state_folder, num_rows)
        rows = mapped(self._rows, job.schema.columns, encode, KEYED)
        # Tasks that are not in the window pass through their buckets, too, so none may be left out.
        all_buckets = self._range(num_buckets).mapInArrow(_no_rows(window), KEYED)
        rows = dealt(rows.union(all_buckets), num_buckets)
        found = collected(rows.mapInArrow(_bucket_writer(window, writer.folder, parts), PAYLOAD))
        written, use = dict(found), TableUse(job)

        def buckets_of(split: str, buckets: range) -> Iterator[Bucket]:
            for bucket in buckets:
                rows_file, used_file = _files(parts, bucket)
                with np.load(used_file) as used:
                    use.add_distinct(used.values())
                newest = TaskRows(rows_file, job.schema).of_bucket(0, 1)
                yield written[bucket]._replace(newest=newest)
                rows_file.unlink()

        done = adopt_buckets(window, writer, state_folder, buckets_of, use, tell)
        shutil.rmtree(parts)
        return done

    def _range(self, stop: int) -> "DataFrame":
        """Return the numbers below `stop`, dealt to about as many tasks as a shuffle has."""
        return self._session.range(0, stop, 1, min(stop, self._parts))


@failures_told()
def _frame(session: "SparkSession", names: list[str], schema: Schema) -> "DataFrame":
    """Return the columns that are read of all files. Raise DataError where Spark cannot read them,
    or does not see a column in them."""
    from pyspark.errors import AnalysisException

    # Hadoop takes a bare path for one of its own default, and knows S3 by another name.
    urls = [name if "://" in name else f"file://{os.path.abspath(name)}" for name in names]
    urls = [f"s3a{url[2:]}" if url.startswith("s3://") else url for url in urls]
    try:
        return session.read.parquet(*urls).select(quoted(schema.columns))
    except AnalysisException as error:
        raise DataError(
            f"Spark cannot read {urls[0]}: {str(error).splitlines()[0]} Correct the path, and "
            "write columns that stand in the names of folders into the files"
        ) from error


def _files(parts: Path, bucket: int) -> tuple[Path, Path]:
    """Return where a worker leaves a bucket's newest rows, and its used rows of hashed tables."""
    return parts / f"{bucket}.arrow", parts / f"{bucket}.npz"


def _ids(batches: _Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch["id"].to_pylist()


def _looker(looking: Looking, num_parts: int) -> Callable[[_Batches], _Batches]:
    def look(batches: _Batches) -> _Batches:
        found = Look()
        for batch in batches:
            found.add(look_at(looking, batch), looking.admissions)
        yield keyed([(_COUNTS, replace(found, seen={}))])
        for table, occurrences in found.seen.items():
            own = merged(occurrences, looking.admissions[table])
            yield keyed([(part, (table, values)) for part, values in own.dealt(num_parts)])

    return look


def _merger(looking: Looking) -> Callable[[_Batches], _Batches]:
    """Return a function that merges the Looks of a part, and the occurrences of its values, into
    one."""

    def merge(batches: _Batches) -> _Batches:
        for bucket, parts in by_bucket(batches):
            found = Look()
            for each in parts:
                own = each if bucket == _COUNTS else Look(seen={each[0]: [each[1]]})
                found.add(own, looking.admissions)
            for table, occurrences in found.seen.items():
                found.seen[table] = [merged(occurrences, looking.admissions[table])]
            yield payload(found)

    return merge


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise AccessError(
            f"a worker of Spark does not see {folder}: the stream must lie on a disk that all of "
            "them share, at the same path. Move it there, or leave --spark out"
        )


def _encoder(
    window: Window, state_folder: Path, num_rows: dict[str, int]
) -> Callable[[_Batches], _Batches]:
    def encode(batches: _Batches) -> _Batches:
        _check_shared(state_folder)
        job = window.job
        encoder = Encoder(job.schema, job.fitted, mapped_tables(state_folder, num_rows))
        for batch in batches:
            yield keyed(split_by_bucket(job.plan, encoded(encoder, window.clock, batch)))

    return encode


def _no_rows(window: Window) -> Callable[[_Batches], _Batches]:
    def give(batches: _Batches) -> _Batches:
        yield keyed([(bucket, joined(window.job.schema, [])) for bucket in _ids(batches)])

    return give


def _bucket_writer(window: Window, dataset: Path, parts: Path) -> Callable[[_Batches], _Batches]:
    """Return a function that writes buckets: each one's shard to the dataset, and what the driver
    is to gather below `parts`; it yields the rest, which is small."""

    def write(batches: _Batches) -> _Batches:
        _check_shared(parts)
        for bucket, found in by_bucket(batches):
            own = joined(window.job.schema, list(found))
            yield payload((bucket, _written(window, dataset, parts, bucket, own)))

    return write


def _written(window: Window, dataset: Path, parts: Path, bucket: int, rows: EncodedRows) -> Bucket:
    job, use = window.job, ShardUse(window.job)
    split = job.fitted.splits.names[job.plan.split_of(bucket)]
    # Files get their names once they are whole: Spark may run a task twice, or kill it.
    with tempfile.TemporaryDirectory(dir=parts) as made:
        folder = Path(made)
        found = write_bucket(window, folder, bucket, rows, window.old_rows(split), use)
        places = {p: dataset / p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
        rows_file, used_file = _files(folder, bucket)
        with TaskRowsWriter(rows_file, job.schema) as kept:
            kept.append(found.newest)
        np.savez(used_file, *use.distinct())
        places |= dict(zip((rows_file, used_file), _files(parts, bucket), strict=True))
        flush_to_disk(places)
        for path, place in places.items():
            place.parent.mkdir(exist_ok=True)
            path.replace(place)
    return found._replace(newest=joined(job.schema, []))
