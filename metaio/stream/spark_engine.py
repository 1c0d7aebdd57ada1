"""prepare --extend on a cluster: Spark reads, shuffles and places the work; the driver holds the
tables and one record of each distinct value of the window."""

# Summaries, encoding, joins and files are the functions of the one-machine engine, so both make the
# same increment to the byte. Workers map the files of the state, which all of them see.
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from metaio.errors import AccessError, DataError
from metaio.format.atomic_folder import flush_to_disk
from metaio.format.dataset_writer import DatasetWriter
from metaio.prepare.engines.spark_batches import (
    KEYED,
    PAYLOAD,
    collect_objects,
    count_nulls,
    group_by_bucket,
    make_keyed_batch,
    make_payload_batch,
    map_batches,
    read_frame,
    repartition_by_bucket,
)
from metaio.prepare.episodes.encode import Encoder
from metaio.prepare.episodes.encoded_rows import EncodedRows, concatenate_rows
from metaio.prepare.episodes.event_rows import EventRowEncoder
from metaio.prepare.episodes.ordered_map import Progress
from metaio.prepare.episodes.spool import split_by_bucket
from metaio.prepare.job import HashedShardUse, HashedTableUse, PrepareOptions
from metaio.prepare.schema.schema import Schema, make_event_schema
from metaio.prepare.source.file_groups import FileGroup
from metaio.prepare.source.source import DuckSource, check_counts
from metaio.stream.engine import BucketResult, WindowJob, WrittenWindow, adopt_buckets, write_bucket
from metaio.stream.newest_rows import NewestRows, NewestRowsWriter
from metaio.stream.numbering import Numbering, Occurrences, merge_occurrences
from metaio.stream.stream_state import map_tables
from metaio.stream.taken_files import InputFile, hash_file
from metaio.stream.window import SummaryContext, WindowSummary, encode_window_rows, summarise_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from metaio.stream.window_events import WindowEvents

_Batches = Iterator[pa.RecordBatch]
# The bucket of counts, which are not dealt by value: they go to the driver unchanged.
_COUNTS = -1


def make_spark_engine(
    session: "SparkSession",
) -> Callable[[DuckSource, Schema, PrepareOptions], "_SparkEngine"]:
    """Return the engine for `metaio.stream.extend.extend(..., engine_of=...)`."""

    # Every worker must see the stream and the tables under the same path or URL.
    def engine_of(source: DuckSource, schema: Schema, options: PrepareOptions) -> _SparkEngine:
        return _SparkEngine(session, source, schema)

    return engine_of


class _SparkEngine:
    """The rows of a source as a frame; the source itself reads only the files' schemas."""

    def __init__(self, session: "SparkSession", source: DuckSource, schema: Schema) -> None:
        """Raise DataError for files that Spark does not read, and for a transform."""
        if schema.transform is not None:
            raise DataError(
                f"the stream's schema has [transform] with {schema.transform.function!r}, which "
                "runs on one machine. Leave --spark out"
            )
        self._session, self._names = session, source.names
        self._rows = read_frame(session, source.groups, schema)
        # 200 is Spark's own default.
        self._parts = int(session.conf.get("spark.sql.shuffle.partitions") or 200)

    def describe_files(self, names: list[str]) -> list[InputFile]:
        """Return the files with their hashes, which the executors compute."""

        def describe(batches: _Batches) -> _Batches:
            for index in _iterate_ids(batches):
                yield make_payload_batch(hash_file(names[index]))

        found = collect_objects(self._make_range(len(names)).mapInArrow(describe, PAYLOAD))
        by_name = {file.name: file for file in found}
        return [by_name[name] for name in names]

    def summarise(self, context: SummaryContext, report_progress: Progress) -> WindowSummary:
        """Return what all rows hold, counted by the executors and added up here."""
        total, nulls = count_nulls(self._rows, context.schema.columns)
        check_counts(context.schema, self._names, total, nulls)
        report_progress("looking", 0, total)
        summarise = _make_summariser(context, self._parts)
        rows = map_batches(self._rows, context.schema.columns, summarise, KEYED)
        # Occurrences of a value meet in one part, so that the driver gets each value once.
        parts = repartition_by_bucket(rows, self._parts)
        found = collect_objects(parts.mapInArrow(_make_merger(context), PAYLOAD))
        # A table without a value in this window must be there, too.
        summary, no_times = WindowSummary(num_read=total), np.zeros(0, np.int64)
        for table, least in context.admissions.items():
            no_values = pa.array([], context.value_types[table])
            summary.occurrences[table] = [Occurrences.of(no_values, no_times, least)]
        for part in found:
            summary.add(part, context.admissions)
        report_progress("looking", total, total)
        return summary

    def write(
        self,
        window: WindowJob,
        tables: dict[str, Numbering],
        events: "WindowEvents",
        writer: DatasetWriter,
        state_folder: Path,
        report_progress: Progress,
    ) -> WrittenWindow:
        """Have the executors encode all rows and write a shard for each bucket."""
        job = window.job
        # Workers map the values from the state: a vocabulary may be as large as their memory.
        window = replace(window, job=replace(job, fitted=replace(job.fitted, vocabularies={})))
        num_rows = {name: table.num_rows for name, table in tables.items()}
        parts = writer.folder / ".parts"
        parts.mkdir()
        num_buckets = sum(job.plan.buckets_of_split)
        encode = _make_encoder(window, state_folder, num_rows)
        rows = map_batches(self._rows, job.schema.columns, encode, KEYED)
        if events.files:
            own = make_event_schema(job.schema)
            group = FileGroup(tuple(file.name for file in events.files), {}, {})
            frame = read_frame(self._session, [group], own)
            encode = _make_encoder(window, state_folder, num_rows, of_events=True)
            rows = rows.union(map_batches(frame, own.columns, encode, KEYED))
        # Buckets without rows of the window still carry earlier tasks, so none may be left out.
        all_buckets = self._make_range(num_buckets).mapInArrow(_make_empty_buckets(window), KEYED)
        rows = repartition_by_bucket(rows.union(all_buckets), num_buckets)
        write = _make_bucket_writer(window, writer.folder, parts)
        found = collect_objects(rows.mapInArrow(write, PAYLOAD))
        written, use = dict(found), HashedTableUse(job)

        def buckets_of(split: str, buckets: range) -> Iterator[BucketResult]:
            for bucket in buckets:
                rows_file, used_file = _name_files(parts, bucket)
                with np.load(used_file) as used:
                    use.add_distinct(used.values())
                # Read bucket by bucket: the newest rows of all tasks may exceed the driver's
                # memory.
                newest = NewestRows(rows_file, job.schema).read_bucket(0, 1)
                yield written[bucket]._replace(newest=newest)
                rows_file.unlink()

        done = adopt_buckets(window, writer, state_folder, buckets_of, use, report_progress)
        shutil.rmtree(parts)
        return done

    def _make_range(self, stop: int) -> "DataFrame":
        """Return the numbers below `stop`, dealt to about as many tasks as a shuffle has."""
        return self._session.range(0, stop, 1, min(stop, self._parts))


def _name_files(parts: Path, bucket: int) -> tuple[Path, Path]:
    """Return the files of a bucket's newest rows, and of its used rows of hashed tables."""
    return parts / f"{bucket}.arrow", parts / f"{bucket}.npz"


def _iterate_ids(batches: _Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch["id"].to_pylist()


def _make_summariser(context: SummaryContext, num_parts: int) -> Callable[[_Batches], _Batches]:
    def look(batches: _Batches) -> _Batches:
        found = WindowSummary()
        for batch in batches:
            found.add(summarise_batch(context, batch), context.admissions)
        yield make_keyed_batch([(_COUNTS, replace(found, occurrences={}))])
        for table, occurrences in found.occurrences.items():
            own = merge_occurrences(occurrences, context.admissions[table])
            dealt = own.deal(num_parts)
            yield make_keyed_batch([(part, (table, values)) for part, values in dealt])

    return look


def _make_merger(context: SummaryContext) -> Callable[[_Batches], _Batches]:
    """Return a function that merges the summaries of a part into one."""

    def merge(batches: _Batches) -> _Batches:
        for bucket, parts in group_by_bucket(batches):
            found = WindowSummary()
            for each in parts:
                own = each if bucket == _COUNTS else WindowSummary(occurrences={each[0]: [each[1]]})
                found.add(own, context.admissions)
            for table, occurrences in found.occurrences.items():
                admission = context.admissions[table]
                found.occurrences[table] = [merge_occurrences(occurrences, admission)]
            yield make_payload_batch(found)

    return merge


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise AccessError(
            f"a worker of Spark does not see {folder}: the stream must lie on a disk that all of "
            "them share, at the same path. Move it there, or leave --spark out"
        )


def _make_encoder(
    window: WindowJob, state_folder: Path, num_rows: dict[str, int], of_events: bool = False
) -> Callable[[_Batches], _Batches]:
    def encode(batches: _Batches) -> _Batches:
        _check_shared(state_folder)
        job = window.job
        encoder = Encoder(job.schema, job.fitted, map_tables(state_folder, num_rows))
        encode_rows: Callable[[pa.RecordBatch], EncodedRows] = (
            EventRowEncoder(encoder).encode
            if of_events
            else partial(encode_window_rows, encoder, window.screen)
        )
        for batch in batches:
            yield make_keyed_batch(split_by_bucket(job.plan, encode_rows(batch)))

    return encode


def _make_empty_buckets(window: WindowJob) -> Callable[[_Batches], _Batches]:
    def give(batches: _Batches) -> _Batches:
        no_rows = concatenate_rows(window.job.schema, [])
        yield make_keyed_batch([(bucket, no_rows) for bucket in _iterate_ids(batches)])

    return give


def _make_bucket_writer(
    window: WindowJob, dataset: Path, parts: Path
) -> Callable[[_Batches], _Batches]:
    """Return a function that writes shards and large results, and yields small ones."""

    # Large: the newest rows and used ids of each bucket, which the driver reads from `parts`.
    def write(batches: _Batches) -> _Batches:
        _check_shared(parts)
        for bucket, found in group_by_bucket(batches):
            own = concatenate_rows(window.job.schema, list(found))
            yield make_payload_batch((bucket, _write_bucket(window, dataset, parts, bucket, own)))

    return write


def _write_bucket(
    window: WindowJob, dataset: Path, parts: Path, bucket: int, rows: EncodedRows
) -> BucketResult:
    job, use = window.job, HashedShardUse(window.job)
    split = job.fitted.splits.names[job.plan.find_split(bucket)]
    # Spark may run a task twice, or kill it: files get their names when they are complete.
    with tempfile.TemporaryDirectory(dir=parts) as made:
        folder = Path(made)
        found = write_bucket(window, folder, bucket, rows, window.open_old_rows(split), use)
        places = {p: dataset / p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
        rows_file, used_file = _name_files(folder, bucket)
        with NewestRowsWriter(rows_file, job.schema) as kept:
            kept.append(found.newest)
        np.savez(used_file, *use.distinct())
        places |= dict(zip((rows_file, used_file), _name_files(parts, bucket), strict=True))
        flush_to_disk(places)
        for path, place in places.items():
            place.parent.mkdir(exist_ok=True)
            path.replace(place)
    return found._replace(newest=concatenate_rows(job.schema, []))
