"""prepare on one machine: raw tables to a dataset, out of core.

Survey the rows (vocabularies and means come from the train split), encode them into buckets of
complete tasks on disk, then sort each bucket and write it as a shard."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from metaio.format.atomic_folder import find_free_place
from metaio.format.dataset_writer import DatasetWriter
from metaio.prepare.episodes.cut_episodes import DroppedRows, check_not_empty
from metaio.prepare.episodes.encode import Encoder
from metaio.prepare.episodes.encoded_rows import EncodedRows
from metaio.prepare.episodes.event_rows import EventRowEncoder, survey_events
from metaio.prepare.episodes.negatives import Catalogue
from metaio.prepare.episodes.ordered_map import Progress, count_parallel_buckets, map_in_order
from metaio.prepare.episodes.raw_ids import write_raw_ids
from metaio.prepare.episodes.splits import Splits, list_split_names, make_splits
from metaio.prepare.episodes.spool import Spool
from metaio.prepare.episodes.survey import Survey, fit_encoding, list_survey_columns, survey_batch
from metaio.prepare.job import HashedTableUse, Job, PrepareOptions, WrittenShard, make_job
from metaio.prepare.schema.schema import Schema
from metaio.prepare.source.bad_lines import write_bad_lines
from metaio.prepare.source.source import DuckSource, EventBatches, open_event_log
from metaio.prepare.source.transform import describe_transform


def prepare(
    inputs: list[str],
    out: str,
    schema: Schema,
    options: PrepareOptions | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a dataset at URL `out` from raw tables: URLs, globs or folders of any input kind."""
    options = options or PrepareOptions()
    find_free_place(out, options.overwrite)  # before hours of reading
    report_progress = progress or (lambda phase, done, total: None)
    limits: Any = {"memory_bytes": options.memory_of_log(schema), "threads": options.threads}
    with DuckSource(inputs, schema, **limits) as source, ExitStack() as opened:
        total = source.survey()
        column = schema.splits.column
        types = source.arrow_types(schema.columns)
        event_log = open_event_log(schema, schema.event_files, types, **limits)
        events = opened.enter_context(event_log)
        # Names first: a row's split is an index into them.
        names = list_split_names(schema, source.find_distinct(column) if column else None)
        splits = make_splits(
            schema,
            names,
            types,
            lambda search, time: search.count_all(source.batches([time]), time),
        )

        def report(phase: str) -> Callable[[int], None]:
            return lambda done: report_progress(phase, done, total)

        survey = _survey(source, schema, splits, options.threads, report("looking"))
        count = partial(survey_events, schema, splits=splits)
        for part in map_in_order(options.threads, count, events()):
            survey.add(part)
        job = make_job(schema, options, fit_encoding(schema, survey, splits), survey, types)
        with job.open(out) as writer:
            # Inside the unfinished dataset: on the same disk, and removed with it.
            spool = Spool(writer.folder / ".spool", schema, job.plan)
            job = _encode(job, source, events, spool, report("encoding"))
            _write_shards(job, writer, spool, source.left_out, report("writing"))
            write_raw_ids(writer.folder, schema, survey)
            write_bad_lines(writer.folder, source.bad_lines)
            spool.close()


def _encode(
    job: Job,
    source: DuckSource,
    events: EventBatches,
    spool: Spool,
    report_progress: Callable[[int], None],
) -> Job:
    """Deal all rows to buckets; return the job with the catalogue of items, if it needs one."""
    encoder, items, done = Encoder(job.schema, job.fitted), job.make_catalogue_builder(), 0

    # Runs in worker threads; only appending to the spool is serial.
    def encode(batch: pa.RecordBatch) -> tuple[int, Catalogue | None, EncodedRows]:
        rows = encoder.encode(batch)
        found = items.build_from_rows(rows) if items else None
        return batch.num_rows, found, job.copy_to_windows(rows)

    batches = source.batches(job.schema.columns)
    for num_rows, found, rows in map_in_order(job.options.threads, encode, batches):
        spool.append(rows)
        if items is not None and found is not None:
            items.add(found)
        done += num_rows
        report_progress(done)
    of_events = EventRowEncoder(encoder)
    for rows in map_in_order(
        job.options.threads, lambda batch: job.copy_to_windows(of_events.encode(batch)), events()
    ):
        spool.append(rows)
    spool.flush()
    return job if items is None else replace(job, catalogue=items.build())


def _survey(
    source: DuckSource,
    schema: Schema,
    splits: Splits,
    threads: int,
    report_progress: Callable[[int], None],
) -> Survey:
    def look(batch: pa.RecordBatch) -> Survey:
        return survey_batch(schema, batch, splits)

    total, done = Survey(), 0
    for part in map_in_order(threads, look, source.batches(list_survey_columns(schema))):
        total.add(part)
        done += part.num_rows
        report_progress(done)
    return total


def _write_shards(
    job: Job,
    writer: DatasetWriter,
    spool: Spool,
    left_out: dict[str, int],
    report_progress: Callable[[int], None],
) -> None:
    """Write every bucket as a shard of its split, then vocabularies and the report."""
    dropped, use, done, num_episodes = DroppedRows(), HashedTableUse(job), 0, 0

    def write(bucket: int) -> WrittenShard:
        return job.write_shard(writer.folder, bucket, [spool.pop_bucket(bucket)], use)

    for index, name in enumerate(job.fitted.splits.names):
        buckets = job.plan.list_buckets(index)
        largest_bytes = max(spool.num_bytes(bucket) for bucket in buckets)
        options = job.options
        # For each split anew: one of few long tasks has larger buckets.
        threads = count_parallel_buckets(options.memory_bytes, options.threads, largest_bytes)
        for shard in map_in_order(threads, write, buckets):
            writer.adopt_shard(name, shard.entry, shard.block_table)
            dropped += shard.dropped
            num_episodes += shard.entry.num_episodes
            done += shard.num_rows
            report_progress(done)
    check_not_empty(num_episodes, dropped)
    job.write_vocabularies(writer.folder)
    # Only what there was: other engines have no files, and must write the same manifest.
    lost = dropped.report() | {name: count for name, count in left_out.items() if count}
    writer.report = {"dropped": lost, "hashed_tables": use.report()}
    writer.report |= describe_transform(job.schema.transform)
