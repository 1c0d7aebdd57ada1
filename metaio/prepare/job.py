"""What every engine of prepare shares once the rows are surveyed: buckets, blocks, report."""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaio.errors import DataError, MetaIOError
from metaio.format.block import Block, build_block, bundle_ids
from metaio.format.dataset import open_dataset
from metaio.format.dataset_writer import DatasetWriter, Provenance, find_block_bounds, write_dataset
from metaio.format.features import Features
from metaio.format.layout import (
    DEFAULT_BLOCK_ROWS,
    VOCABULARY_FOLDER,
    usual_bundle_tasks,
    write_vocabulary,
)
from metaio.format.manifest import ShardEntry
from metaio.format.shard_writer import ShardWriter
from metaio.prepare.episodes.cut_episodes import DroppedRows, make_episodes
from metaio.prepare.episodes.encode import FittedEncoding
from metaio.prepare.episodes.encoded_rows import EncodedRows, select_rows
from metaio.prepare.episodes.negatives import Catalogue, CatalogueBuilder
from metaio.prepare.episodes.splits import copy_to_windows
from metaio.prepare.episodes.spool import BucketPlan, plan_buckets, split_by_bucket
from metaio.prepare.episodes.survey import Survey
from metaio.prepare.schema.event_columns import EventClock
from metaio.prepare.schema.schema import IdColumn, Schema, make_features
from metaio.prepare.schema.side_columns import EVENT_ONLY, QUERY
from metaio.prepare.schema.values import Kind, infer_kind, parse_time
from metaio.ragged import Int64

DEFAULT_MEMORY_BYTES = 2 << 30
# With 8 blocks, half a million rows of 300 bytes sort in memory within 1 GB.
SHARD_BLOCKS = 8
# Used ids of larger tables are not counted: it would cost more than it tells.
MAX_COUNTED_ROWS = 1 << 28


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare; only `block_rows` and `bundle_tasks` change the bytes that come out."""

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    threads: int = os.cpu_count() or 1
    block_rows: int = DEFAULT_BLOCK_ROWS
    # Episodes of the train split that keep separate ids; None: by the number of its rows.
    bundle_tasks: int | None = None
    compact: bool = False
    overwrite: bool = False
    # What the manifest says of a recipe beside its schema: its name and settings.
    recipe: dict[str, Any] = field(default_factory=dict)
    protocol: str = ""

    def memory_of_log(self, schema: Schema) -> int:
        """Return the bytes that reading a log may take: half is for encoded rows, the other for one
        log or, with that of [events] files, for two."""
        return self.memory_bytes // (4 if schema.event_files else 2)


class WrittenShard(NamedTuple):
    """A bucket's shard: its manifest entry and block table, and what was dropped of its tasks."""

    bucket: int
    entry: ShardEntry
    block_table: pa.Table
    dropped: DroppedRows
    num_rows: int  # of the bucket, dropped ones included
    num_query_side: int  # in episodes of the first part; of a stream, those of its window


@dataclass(frozen=True)
class Job:
    """One run of prepare; it is sent to every worker of a cluster, vocabularies included."""

    schema: Schema
    options: PrepareOptions
    fitted: FittedEncoding
    plan: BucketPlan
    features: Features
    task_kind: str
    cut_time: int | None
    bundle_tasks: int = 0  # of the train split
    clock: EventClock | None = None  # of a schema with [events]
    # The items for negatives; known once all rows are encoded.
    catalogue: Catalogue | None = None

    def open(self, out: str) -> AbstractContextManager[DatasetWriter]:
        """Return the writer of the dataset."""
        schema = self.schema
        # Without overwrite the writer refuses an old dataset by itself.
        if self.options.overwrite:
            self._check_kinds(out)
        recipe = {"name": "schema", "schema": schema.to_json(), "moments": self.fitted.moments}
        recipe |= {"kinds": self.fitted.kinds, **self.options.recipe}
        protocol = self.options.protocol or _describe_protocol(schema)
        provenance = Provenance(
            schema.task.column, schema.label_text, schema.seed, self.task_kind, protocol, recipe
        )
        return write_dataset(
            out,
            self.features,
            provenance,
            block_rows=self.options.block_rows,
            compact=self.options.compact,
            overwrite=self.options.overwrite,
        )

    def _check_kinds(self, out: str) -> None:
        """Raise DataError where a model of the dataset at `out` would misread the new ids."""
        try:
            kinds = open_dataset(out).manifest.recipe.get("kinds")
        except MetaIOError:
            return  # none there, or none that a model could have been trained on
        for name, kind in self.fitted.kinds.items():
            before = kinds.get(name, kind) if isinstance(kinds, dict) else kind
            if kind != before:
                raise DataError(
                    f"column {name} holds {kind} values, in the dataset at {out} it held {before}: "
                    f"its ids would change. Cast the column to {before}, or remove that dataset"
                )

    def make_catalogue_builder(self) -> CatalogueBuilder | None:
        """Return a builder of the catalogue of negatives; None if none are drawn."""
        if self.schema.negatives is None:
            return None
        train = self.fitted.splits.names.index(self.schema.splits.train)
        return CatalogueBuilder(self.schema, train)

    def copy_to_windows(self, rows: EncodedRows) -> EncodedRows:
        """Return the encoded rows, each once for each window of time that knows it."""
        splits = self.fitted.splits
        if splits.window_starts:
            chosen, split_N, side_N = copy_to_windows(splits, rows.split_N.astype(np.int64))
            copies = select_rows(rows, chosen)
            side_NS = np.where(copies.side_NS == EVENT_ONLY, EVENT_ONLY, side_N[:, None])
            side_NS = side_NS.astype(np.int8)
            rows = replace(copies, split_N=split_N.astype(np.int32), side_NS=side_NS)
        return rows

    def deal(self, rows: EncodedRows) -> list[tuple[int, EncodedRows]]:
        """Return the encoded rows of each bucket that gets any."""
        return split_by_bucket(self.plan, self.copy_to_windows(rows))

    def write_shard(
        self,
        folder: Path,
        bucket: int,
        parts: Sequence[EncodedRows],
        id_use: "Use",
        hidden: tuple[int, ...] = (),
    ) -> WrittenShard:
        """Write all rows of a bucket as a shard, and count its ids. Of several parts, which may
        have rows of one task, each is cut into episodes by itself. Support rows of the query side
        do not show the labels `hidden`."""
        # Called by several threads at once, each for another bucket.
        split = self.plan.find_split(bucket)
        cutting = self.fitted.splits.choose_cutting(self.schema, split)
        # Blocks are cut within a bucket: workers need not know each other's episodes.
        name = self.fitted.splits.names[split]
        is_train = name == self.schema.splits.train
        bundle_tasks = self.bundle_tasks if is_train else 0
        index = bucket - self.plan.list_buckets(split).start
        total, query_side = DroppedRows(), []
        with ShardWriter(folder, name, index, self.features, self.options.compact) as shard:
            for rows in parts:
                episodes, dropped = make_episodes(
                    self.schema, rows, self.cut_time, cutting, self.catalogue, is_train, self.clock
                )
                episodes.hidden = hidden
                lengths_T, block_rows = episodes.row_lengths_T, self.options.block_rows
                for first, stop in pairwise(find_block_bounds(lengths_T, block_rows, bundle_tasks)):
                    block = build_block(self.features, episodes.gather(first, stop))
                    # Bundles serve shuffled training: other splits have none.
                    block = bundle_ids(block, bundle_tasks)
                    shard.write(block)
                    id_use.add(block)
                total += dropped
                query_side.append(episodes.count_side(QUERY))
            num_rows = sum(rows.num_rows for rows in parts)
            return WrittenShard(bucket, *shard.close(), total, num_rows, query_side[0])

    def write_vocabularies(self, folder: Path) -> None:
        """Write the values behind the ids, by which new rows are encoded."""
        for name, values in self.fitted.vocabularies.items():
            write_vocabulary(values, folder / VOCABULARY_FOLDER / f"{name}.parquet")


def make_job(
    schema: Schema,
    options: PrepareOptions,
    fitted: FittedEncoding,
    survey: Survey,
    types: dict[str, pa.DataType],
) -> Job:
    """Return the job: buckets, features and the cut in time, by the Arrow types of raw columns."""
    names = fitted.splits.names
    rows = [survey.rows_of_split[name] + survey.events_of_split[name] for name in names]
    task, at = schema.task.column, schema.episodes.at
    kinds = {
        column.column: infer_column_kind(column, types[column.column]) for column in schema.sparse
    }
    integer = infer_kind(task, types[task], "task") == "integer"
    bundle_tasks = options.bundle_tasks
    if bundle_tasks is None:
        bundle_tasks = usual_bundle_tasks(survey.rows_of_split[schema.splits.train])
    features = make_features(schema, {name: len(v) for name, v in fitted.vocabularies.items()})
    clock: EventClock | None = None
    if schema.time is not None and schema.events is not None:
        clock = EventClock.of(schema.events, schema.time.column, types[schema.time.column])
        features = replace(features, event_delay=clock.delay * clock.seconds_per_tick)
    return Job(
        schema=schema,
        options=options,
        fitted=replace(fitted, kinds=kinds),
        # A bucket becomes a shard of about SHARD_BLOCKS blocks.
        plan=plan_buckets(rows, SHARD_BLOCKS * options.block_rows),
        features=features,
        task_kind="integer" if integer else "hashed",
        cut_time=parse_time(at, types[schema.time.column])
        if schema.time and at is not None
        else None,
        bundle_tasks=bundle_tasks,
        clock=clock,
    )


def _describe_protocol(schema: Schema) -> str:
    """Return in a few words how rows become episodes."""
    rule, parts = schema.episodes, []
    if schema.membership is not None:
        parts.append("given support and query")
    if schema.splits.by_time is not None:
        parts.append("splits by time")
    if schema.stream is not None:
        parts.append("support from before the window")
    parts.append(f"{rule.by}, {rule.min_rows} to {rule.max_rows} rows")
    if schema.negatives is not None:
        parts.append(f"{schema.negatives.per_positive} negatives by {schema.negatives.by}")
    return ", ".join(parts)


def infer_column_kind(column: IdColumn, kind: pa.DataType) -> Kind:
    """Return whether a column's ids, or those in its lists, are integers or text."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return infer_kind(column.column, kind.value_type if is_list else kind, "sparse")


def _list_counted_tables(job: Job) -> list[int]:
    """Return the hashed tables whose used rows are counted."""
    hashed = {column.table_name for column in job.schema.sparse if column.hash is not None}
    tables = enumerate(job.features.tables)
    return [i for i, t in tables if t.name in hashed and t.num_rows <= MAX_COUNTED_ROWS]


class HashedShardUse:
    """The ids of one shard in each counted table: few, however large the tables are."""

    def __init__(self, job: Job) -> None:
        counted = _list_counted_tables(job)
        self._ids: dict[int, list[Int64]] = {i: [np.zeros(0, np.int64)] for i in counted}

    def add(self, block: Block) -> None:
        """Count a block's ids."""
        for index, ids in self._ids.items():
            begin, end = block.unique_offsets_B1[index : index + 2]
            ids.append(block.unique_ids_U[begin:end])

    def distinct(self) -> list[Int64]:
        """Return each table's distinct ids."""
        return [np.unique(np.concatenate(ids)) for ids in self._ids.values()]


class HashedTableUse:
    """The used rows of the hashed tables, from which the values that share a row are estimated."""

    def __init__(self, job: Job) -> None:
        tables = job.features.tables
        self.used: dict[int, npt.NDArray[np.bool_]] = {
            index: np.zeros(tables[index].num_rows, dtype=np.bool_)
            for index in _list_counted_tables(job)
        }
        self._names = [table.name for table in tables]

    def add(self, block: Block) -> None:
        """Count a block's ids."""
        for index, used in self.used.items():
            begin, end = block.unique_offsets_B1[index : index + 2]
            # No lock: threads only ever set flags to True.
            used[block.unique_ids_U[begin:end]] = True

    def add_distinct(self, ids_of_table: Iterable[Int64]) -> None:
        """Add what HashedShardUse counted."""
        for used, ids in zip(self.used.values(), ids_of_table, strict=True):
            used[ids] = True

    def report(self) -> dict[str, dict[str, int]]:
        """Return each table's used rows, and an estimate of the raw values that share one."""
        found = {}
        # Linear counting (Whang et al. 1990): r of R rows used means about -R ln(1 - r/R) values.
        for index, used_R in self.used.items():
            # Row 0 has no value. A full table would mean infinitely many: half a row counts as
            # free.
            rows, used = len(used_R) - 1, int(used_R[1:].sum())
            values = rows * -float(np.log1p(-min(used, rows - 0.5) / rows))
            found[self._names[index]] = {
                "rows": rows,
                "rows_used": used,
                "values_estimated": round(values),
                "values_sharing_a_row_estimated": round(max(values - used, 0.0)),
            }
        return found


Use = HashedTableUse | HashedShardUse
