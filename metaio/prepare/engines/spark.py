"""prepare on a cluster: Spark reads, shuffles and places the work. Needs the extra `spark`."""

# Encoding, order, episodes and files are the functions of the one-machine engine, so both write the
# same dataset to the byte.
import io
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import AccessError, DataError
from metaio.format.atomic_folder import find_free_place, flush_to_disk
from metaio.format.dataset_writer import DatasetWriter
from metaio.format.layout import MANIFEST_NAME
from metaio.format.storage import find_file_system, is_local
from metaio.prepare.engines.spark_batches import (
    KEYED,
    PAYLOAD,
    collect_objects,
    collect_rows,
    count_nulls,
    group_by_bucket,
    make_keyed_batch,
    make_payload_batch,
    map_batches,
    quote_columns,
    read_frame,
    repartition_by_bucket,
)
from metaio.prepare.episodes.cut_episodes import DroppedRows, check_not_empty
from metaio.prepare.episodes.encode import Encoder, check_file_nulls
from metaio.prepare.episodes.encoded_rows import EncodedRows, concatenate_rows
from metaio.prepare.episodes.event_rows import EventRowEncoder, survey_events
from metaio.prepare.episodes.raw_ids import write_raw_ids
from metaio.prepare.episodes.splits import (
    PLACE,
    Splits,
    WindowSearch,
    list_split_names,
    make_splits,
)
from metaio.prepare.episodes.survey import Survey, fit_encoding, list_survey_columns, survey_batch
from metaio.prepare.job import (
    HashedShardUse,
    HashedTableUse,
    Job,
    PrepareOptions,
    WrittenShard,
    make_job,
)
from metaio.prepare.schema.event_columns import check_event_types
from metaio.prepare.schema.schema import Schema, make_event_schema
from metaio.prepare.schema.values import check_cases, warn_of_mixed_units
from metaio.prepare.source.file_groups import FileGroup
from metaio.prepare.source.input_files import list_file_names
from metaio.prepare.source.source import check_counts
from metaio.ragged import Int64

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# A folder below the dataset until all shards are there: for what workers have not finished (on a
# disk), and for each shard's used ids, too many to send to the driver.
_PARTS = ".parts"
# Columns with a row's file and its place there, while Spark moves it.
_FILE, _ROW = "file of the row", "row of the file"
# More than any file has, so that file and row make one number.
_ROWS_OF_A_FILE = 1 << 40


def prepare_with_spark(
    frame: "DataFrame", out: str, schema: Schema, options: PrepareOptions | None = None
) -> None:
    """Write a dataset at URL `out`, which all workers reach, from a Spark DataFrame."""
    options = options or PrepareOptions()
    find_free_place(out, options.overwrite)  # before hours of reading
    _check_frame(frame, schema)
    column = schema.splits.column
    # As on one machine, names come first: a row's split is an index into them.
    names = list_split_names(schema, _find_distinct(frame, column) if column else None)
    # Arrow's types, as workers see them: columns are encoded by these.
    types = dict(zip(schema.columns, _arrow_types(frame, schema), strict=True))
    if schema.time is not None:
        _check_time_units(frame, schema.time.column, types[schema.time.column])
    splits = make_splits(schema, names, types, partial(_count_times, frame))
    events = _read_events(frame, schema, types)
    survey = _survey(frame, events, schema, splits)
    job = make_job(schema, options, fit_encoding(schema, survey, splits), survey, types)
    placed, files = _with_places(frame, schema)
    job = _with_items(frame, job)
    columns = schema.columns + ([_FILE, _ROW] if files else [])
    rows = map_batches(placed, columns, _make_encoder(job, files), KEYED)
    if events is not None:
        of_events = make_event_schema(schema).columns
        rows = rows.union(map_batches(events, of_events, _make_event_encoder(job), KEYED))
    with job.open(out) as writer:
        _write_shards(rows, job, writer, out)
        write_raw_ids(writer.folder, schema, survey)


def _with_items(frame: "DataFrame", job: Job) -> Job:
    """Return the job with the catalogue of negatives, if it needs one."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        encoder, own = Encoder(job.schema, job.fitted), job.make_catalogue_builder()
        if own is not None:
            for batch in batches:
                own.add(own.build_from_rows(encoder.encode(batch)))
            yield make_payload_batch(own.build())

    items = job.make_catalogue_builder()
    if items is None:
        return job
    for part in collect_objects(map_batches(frame, job.schema.columns, look)):
        items.add(part)
    return replace(job, catalogue=items.build())


def _find_distinct(frame: "DataFrame", column: str) -> list[str]:
    """Return the distinct values of a column, as text."""
    from pyspark.sql import functions

    texts = frame.select(functions.col(*quote_columns([column])).cast("string")).distinct()
    return [row[0] for row in collect_rows(texts)]


def _with_places(frame: "DataFrame", schema: Schema) -> tuple["DataFrame", list[str]]:
    """Return the rows with file and place, if the schema needs an order, and the files' names."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions

    if not schema.needs_input_order:
        return frame, []
    origin = [functions.col("_metadata.file_path"), functions.col("_metadata.row_index")]
    try:
        files = [row[0] for row in collect_rows(frame.select(origin[0]).distinct())]
        places = origin[0].alias(_FILE), origin[1].alias(_ROW)
        frame_with_places = frame.select(*quote_columns(schema.columns), *places)
    except AnalysisException as error:
        raise DataError(
            "the rows of a task are shuffled by their place in the input, but this DataFrame is no "
            "Parquet file as it was read, and has no order. Name a column that tells rows apart "
            "under [row_id]"
        ) from error
    return frame_with_places, sorted(files, key=unquote)  # as they are called on a disk


def _count_times(frame: "DataFrame", search: WindowSearch, column: str) -> Int64:
    """Return how many times of all rows fall into each bin of this pass of a search."""
    # Pickled now: the state of this pass, before `narrow` changes it.
    pickled = pickle.dumps(search)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield make_payload_batch(pickle.loads(pickled).count_all(batches, column))

    parts = collect_objects(map_batches(frame, [column], count))
    return sum(parts, start=np.zeros(1, np.int64))


def _check_frame(frame: "DataFrame", schema: Schema) -> None:
    if schema.membership is not None and schema.membership.by_files:
        raise DataError(
            "membership by file names is for one machine: a DataFrame has rows, not files. Add a "
            "column that says support or query, and name it under [membership]"
        )
    if schema.time is not None and schema.time.format is not None:
        raise DataError(
            f"time.format is {schema.time.format!r}, which Spark does not know. Make the column a "
            "timestamp with to_timestamp(), and leave the format out"
        )
    check_cases("the DataFrame", frame.columns, schema.columns)
    for column in schema.columns:
        if column not in frame.columns:
            raise DataError(
                f"the DataFrame has no column {column}; it has {', '.join(frame.columns)}. "
                "Correct the schema"
            )
    total, nulls = count_nulls(frame, schema.columns)
    if total == 0:
        raise DataError("the DataFrame holds no rows. Check its source")
    check_file_nulls(schema, nulls)


def _read_events(
    frame: "DataFrame", schema: Schema, types: dict[str, pa.DataType]
) -> "DataFrame | None":
    """Return the rows of the files of [events]; None where the schema names none."""
    if not schema.event_files:
        return None
    own, names = make_event_schema(schema), list_file_names(schema.event_files)
    events = read_frame(frame.sparkSession, [FileGroup(tuple(names), {}, {})], own)
    check_counts(own, names, *count_nulls(events, own.columns))
    found = dict(zip(own.columns, _arrow_types(events, own), strict=True))
    check_event_types(schema, types, found)
    return events


def _check_time_units(frame: "DataFrame", column: str, kind: pa.DataType) -> None:
    """Warn of numeric times in two units."""
    from pyspark.sql import functions

    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        times = functions.abs(functions.col(*quote_columns([column])).cast("double"))
        powers = frame.select(functions.floor(functions.log10(times))).distinct()
        warn_of_mixed_units(column, (row[0] for row in collect_rows(powers)))


def _arrow_types(frame: "DataFrame", schema: Schema) -> list[pa.DataType]:
    """Return the types as workers see them, from a batch that Spark makes."""

    def first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield make_payload_batch(batch.schema)
            return

    return list(collect_objects(map_batches(frame.limit(1), schema.columns, first))[0].types)


def _survey(
    frame: "DataFrame", events: "DataFrame | None", schema: Schema, splits: Splits
) -> Survey:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        own = Survey()
        for batch in batches:
            own.add(survey_batch(schema, batch, splits))
        yield make_payload_batch(own)

    def look_at_events(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield make_payload_batch(survey_events(schema, batch, splits))

    total = Survey()
    surveys = map_batches(frame, list_survey_columns(schema), look)
    if events is not None:
        columns = make_event_schema(schema).columns
        surveys = surveys.union(map_batches(events, columns, look_at_events))
    for part in collect_objects(surveys):
        total.add(part)
    return total


def _write_shards(rows: "DataFrame", job: Job, writer: DatasetWriter, out: str) -> None:
    """Write a shard of the encoded rows of each bucket."""
    num_buckets = sum(job.plan.buckets_of_split)
    rows = repartition_by_bucket(rows, num_buckets)  # a task per bucket
    target = str(writer.folder) if writer.is_local else out
    fs, root = find_file_system(target)
    if writer.is_local:
        (writer.folder / _PARTS).mkdir()
    # In a store workers write into the dataset itself: an old manifest must not list new files.
    elif fs.exists(f"{root}/{MANIFEST_NAME}"):
        fs.rm_file(f"{root}/{MANIFEST_NAME}")
    try:
        written = collect_objects(rows.mapInArrow(_make_shard_writer(job, target), PAYLOAD))
        _adopt_shards({shard.bucket: shard for shard in written}, job, writer, target)
    finally:
        _remove_parts(fs, f"{root}/{_PARTS}")
    job.write_vocabularies(writer.folder)


def _remove_parts(fs: Any, parts: str) -> None:
    if is_local(fs):
        # Renamed first, so that a task that Spark abandoned cannot write there meanwhile.
        shutil.rmtree(Path(parts).rename(f"{parts}.gone"), ignore_errors=True)
        return
    # A store has no folder before its first file.
    with suppress(FileNotFoundError):
        fs.rm(parts, recursive=True)


def _adopt_shards(
    found: dict[int, WrittenShard], job: Job, writer: DatasetWriter, target: str
) -> None:
    """Give the writer all shards, in order, and the report on them."""
    dropped, use, num_episodes = DroppedRows(), HashedTableUse(job), 0
    fs, root = find_file_system(target)
    for index, name in enumerate(job.fitted.splits.names):
        for bucket in job.plan.list_buckets(index):
            # Spark starts no task for a bucket without rows; its shard is empty but must exist.
            none = concatenate_rows(job.schema, [])
            shard = found.get(bucket) or _write_shard(job, target, bucket, none)
            writer.adopt_shard(name, shard.entry, shard.block_table)
            dropped += shard.dropped
            num_episodes += shard.entry.num_episodes
            with np.load(io.BytesIO(fs.cat_file(f"{root}/{_name_used_file(bucket)}"))) as used:
                use.add_distinct(used.values())
    check_not_empty(num_episodes, dropped)
    writer.report = {"dropped": dropped.report(), "hashed_tables": use.report()}


def _make_encoder(
    job: Job, files: list[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        encoder = Encoder(job.schema, job.fitted)
        for batch in batches:
            if files:
                file = pc.index_in(batch[_FILE], value_set=pa.array(files)).cast(pa.int64())
                place = pc.add(pc.multiply(file, _ROWS_OF_A_FILE), batch[_ROW])
                batch = batch.append_column(PLACE, place)
            yield make_keyed_batch(job.deal(encoder.encode(batch)))

    return encode


def _make_event_encoder(job: Job) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        encoder = EventRowEncoder(Encoder(job.schema, job.fitted))
        for batch in batches:
            yield make_keyed_batch(job.deal(encoder.encode(batch)))

    return encode


def _make_shard_writer(
    job: Job, target: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for bucket, parts in group_by_bucket(batches):
            rows = concatenate_rows(job.schema, list(parts))
            yield make_payload_batch(_write_shard(job, target, bucket, rows))

    return write


def _name_used_file(bucket: int) -> str:
    return f"{_PARTS}/{bucket}.npz"


def _write_shard(job: Job, target: str, bucket: int, rows: EncodedRows) -> WrittenShard:
    """Write a bucket's shard and its used ids below `target`; return what the manifest needs."""
    use = HashedShardUse(job)
    fs, root = find_file_system(target)
    parts = Path(root) / _PARTS if is_local(fs) else None
    if parts is not None and not parts.is_dir():
        raise AccessError(
            f"a worker of Spark does not see {root}: the dataset must go to a disk that all of "
            "them share, at the same path, or to an object store. Choose such a place"
        )
    with tempfile.TemporaryDirectory(prefix="metaio-shard-", dir=parts) as made:
        folder = Path(made)
        shard = job.write_shard(folder, bucket, [rows], use)
        used_file = folder / _name_used_file(bucket)
        used_file.parent.mkdir()
        np.savez(used_file, *use.distinct())
        _move_into_place(fs, folder, root)
    return shard


def _move_into_place(fs: Any, folder: Path, root: str) -> None:
    """Move finished files into place, each atomically."""
    # Spark may run a task twice, or kill it: files must appear complete.
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if is_local(fs):
        flush_to_disk(paths)
        for path in paths:
            place = Path(root) / path.relative_to(folder)
            # No `parents`: a task that Spark abandoned must not recreate a folder that is gone.
            place.parent.mkdir(exist_ok=True)
            path.replace(place)
        return
    for path in paths:
        fs.put_file(str(path), f"{root}/{path.relative_to(folder).as_posix()}")
