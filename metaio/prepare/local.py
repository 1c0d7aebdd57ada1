"""prepare on one machine: raw tables to a dataset, out of core.

Look at the rows once (vocabularies and means are learnt from the train split), encode them into
buckets of whole tasks on disk, then sort each bucket and write it as a shard.
"""

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from metaio.format.destination import free_place
from metaio.format.writer import DatasetWriter
from metaio.prepare.encode import Encoder
from metaio.prepare.encoded_rows import EncodedRows
from metaio.prepare.episodes import Dropped, check_some
from metaio.prepare.in_order import Progress, buckets_at_once, map_in_order
from metaio.prepare.job import Job, PrepareOptions, TableUse, WrittenShard, make_job
from metaio.prepare.negatives import Catalogue
from metaio.prepare.raw_ids import write_raw_ids
from metaio.prepare.schema import Schema
from metaio.prepare.source import DuckSource
from metaio.prepare.splits import Splits, split_names, splits_of
from metaio.prepare.spool import Spool
from metaio.prepare.survey import Survey, fit, survey_batch, survey_columns
from metaio.prepare.transform import told_transform


def prepare(
    inputs: list[str],
    out: str,
    schema: Schema,
    options: PrepareOptions | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a dataset at URL `out` from raw tables (URLs, globs or folders of CSV, TSV or
    Parquet)."""
    options = options or PrepareOptions()
    free_place(out, options.overwrite)  # before hours of reading
    tell = progress or (lambda phase, done, total: None)
    memory_bytes = options.memory_bytes // 2  # the other half is for encoded rows
    with DuckSource(inputs, schema, memory_bytes=memory_bytes, threads=options.threads) as source:
        total = source.survey()
        column = schema.splits.column
        types = source.arrow_types(schema.columns)
        # The names come first: a row's split is an index into them.
        names = split_names(schema, source.distinct(column) if column else None)
        splits = splits_of(
            schema,
            names,
            types,
            lambda search, time: search.count_all(source.batches([time]), time),
        )
        survey = _survey(
            source, schema, splits, options.threads, lambda done: tell("looking", done, total)
        )
        job = make_job(schema, options, fit(schema, survey, splits), survey, types)
        with job.open(out) as writer:
            # Inside the unfinished dataset: on its disk, and gone with it.
            spool = Spool(writer.folder / ".spool", schema)
            job = _encode(job, source, spool, lambda done: tell("encoding", done, total))
            _write_shards(
                job, writer, spool, source.left_out, lambda done: tell("writing", done, total)
            )
            write_raw_ids(writer.folder, schema, survey)
            spool.close()


def _encode(job: Job, source: DuckSource, spool: Spool, tell: Callable[[int], None]) -> Job:
    """Deal all rows to buckets; return the job with the items that they are of, if it needs any."""
    schema, encoder, items, done = job.schema, Encoder(job.schema, job.fitted), job.items(), 0

    def encode(
        batch: pa.RecordBatch,
    ) -> tuple[int, Catalogue | None, list[tuple[int, EncodedRows]]]:
        rows = encoder.encode(batch)
        return batch.num_rows, items.of_rows(rows) if items else None, job.dealt(rows)

    batches = source.batches(schema.columns)
    for num_rows, found, parts in map_in_order(job.options.threads, encode, batches):
        spool.append(parts)
        if items is not None and found is not None:
            items.add(found)
        done += num_rows
        tell(done)
    spool.flush()
    return job if items is None else replace(job, catalogue=items.merged())


def _survey(
    source: DuckSource,
    schema: Schema,
    splits: Splits,
    threads: int,
    tell: Callable[[int], None],
) -> Survey:
    def look(batch: pa.RecordBatch) -> Survey:
        return survey_batch(schema, batch, splits)

    total, done = Survey(), 0
    for part in map_in_order(threads, look, source.batches(survey_columns(schema))):
        total.add(part)
        done += part.num_rows
        tell(done)
    return total


def _write_shards(
    job: Job,
    writer: DatasetWriter,
    spool: Spool,
    left_out: dict[str, int],
    tell: Callable[[int], None],
) -> None:
    """Turn every bucket into a shard of its split, then write vocabularies and the report."""
    dropped, use, done, num_episodes = Dropped(), TableUse(job), 0, 0

    def write(bucket: int) -> WrittenShard:
        return job.write_shard(writer.folder, bucket, spool.take(bucket), use)

    for index, name in enumerate(job.fitted.splits.names):
        buckets = job.plan.of_split(index)
        largest_bytes = max(spool.num_bytes(bucket) for bucket in buckets)
        options = job.options
        threads = buckets_at_once(options.memory_bytes, options.threads, largest_bytes)
        for shard in map_in_order(threads, write, buckets):
            writer.adopt_shard(name, shard.entry, shard.block_table)
            dropped += shard.dropped
            num_episodes += shard.entry.num_episodes
            done += shard.num_rows
            tell(done)
    check_some(num_episodes, dropped)
    job.write_vocabularies(writer.folder)
    # Only what there was: other engines know no files, and must write the same manifest.
    lost = dropped.report() | {name: count for name, count in left_out.items() if count}
    writer.report = {"dropped": lost, "hashed_tables": use.report()}
    writer.report |= told_transform(job.schema.transform)
