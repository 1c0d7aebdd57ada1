"""Who does the work on an increment's rows: one machine here, Spark in spark.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from metaio.format.writer import DatasetWriter
from metaio.prepare.encode import Encoder
from metaio.prepare.encoded_rows import EncodedRows
from metaio.prepare.in_order import Progress, buckets_at_once, map_in_order
from metaio.prepare.job import PrepareOptions, TableUse
from metaio.prepare.schema import Schema
from metaio.prepare.source import DuckSource
from metaio.prepare.spool import Spool, split_by_bucket
from metaio.stream.inputs import InputFile, described
from metaio.stream.numbering import Numbering
from metaio.stream.shards import Bucket, Window, Written, adopt_buckets, write_bucket
from metaio.stream.window import Look, Looking, encoded, look_at


class Engine(Protocol):
    """Reads the rows of the inputs, each time anew."""

    def described(self, names: list[str]) -> list[InputFile]:
        """Return the files with their hashes.

        Raises:
            DataError: one cannot be read.
        """

    def look(self, looking: Looking, tell: Progress) -> Look:
        """Return what all rows hold.

        Raises:
            DataError: they hold what makes no sense, or there are none.
        """

    def write(
        self,
        window: Window,
        tables: dict[str, Numbering],
        writer: DatasetWriter,
        state_folder: Path,
        tell: Progress,
    ) -> Written:
        """Encode all rows by the tables, which stand in the folder of the state too, and write
        shards, and to that folder the newest rows of all tasks.

        Raises:
            DataError: the rows make no training episode, or two of a task have one row id.
        """


class OneMachine:
    """The rows of a source, dealt to buckets on the disk."""

    def __init__(self, source: DuckSource, schema: Schema, options: PrepareOptions) -> None:
        self._source, self._schema, self._options = source, schema, options

    def described(self, names: list[str]) -> list[InputFile]:
        """See Engine."""
        return [described(name) for name in names]

    def look(self, looking: Looking, tell: Progress) -> Look:
        """See Engine."""
        look, done, total = Look(), 0, self._source.survey()

        def look_at_batch(batch: pa.RecordBatch) -> tuple[int, Look]:
            return batch.num_rows, look_at(looking, batch)

        batches = self._source.batches(self._schema.columns)
        for num_rows, part in map_in_order(self._options.threads, look_at_batch, batches):
            look.add(part, looking.admissions)
            done += num_rows
            tell("looking", done, total)
        return look

    def write(
        self,
        window: Window,
        tables: dict[str, Numbering],
        writer: DatasetWriter,
        state_folder: Path,
        tell: Progress,
    ) -> Written:
        """See Engine."""
        job, options = window.job, self._options
        spool = Spool(writer.folder / ".spool", job.schema)
        self._encode(window, tables, spool, tell)
        use = TableUse(job)

        def buckets_of(split: str, buckets: range) -> Iterator[Bucket]:
            old_rows = window.old_rows(split)

            def write(bucket: int) -> Bucket:
                rows = spool.take(bucket)
                return write_bucket(window, writer.folder, bucket, rows, old_rows, use)

            largest = max(spool.num_bytes(bucket) for bucket in buckets)
            largest += old_rows.num_bytes // len(buckets)
            threads = buckets_at_once(options.memory_bytes, options.threads, largest)
            return map_in_order(threads, write, buckets)

        written = adopt_buckets(window, writer, state_folder, buckets_of, use, tell)
        spool.close()
        return written

    def _encode(
        self, window: Window, tables: dict[str, Numbering], spool: Spool, tell: Progress
    ) -> None:
        job, clock, done = window.job, window.clock, 0
        encoder = Encoder(job.schema, job.fitted, tables)

        def encode(batch: pa.RecordBatch) -> tuple[int, list[tuple[int, EncodedRows]]]:
            rows = encoded(encoder, clock, batch)
            return rows.num_rows, split_by_bucket(job.plan, rows)

        batches = self._source.batches(self._schema.columns)
        for num_rows, parts in map_in_order(self._options.threads, encode, batches):
            spool.append(parts)
            done += num_rows
            tell("encoding", done, window.num_rows)
        spool.flush()
