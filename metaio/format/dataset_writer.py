"""Writes a dataset: cuts episodes into blocks and shards, and commits them at once.

A dataset is built in a temporary folder beside its destination; renaming that folder is the commit
(object stores: the manifest is uploaded last)."""

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from metaio.errors import DataError, SchemaError
from metaio.format.atomic_folder import flush_to_disk, open_destination
from metaio.format.block import Rows, build_block, bundle_ids, find_features_of_values
from metaio.format.features import Features
from metaio.format.layout import (
    BLOCK_TABLE_NAME,
    DEFAULT_BLOCK_ROWS,
    DEFAULT_SHARD_BLOCKS,
    MANIFEST_NAME,
    RAW_IDS_FOLDER,
    RESET_FOLDER,
    VOCABULARY_FOLDER,
    list_streams,
    make_block_table_schema,
)
from metaio.format.manifest import (
    FileEntry,
    Manifest,
    ShardEntry,
    SplitEntry,
    StreamPlace,
    canonical_json,
    encode_manifest,
    xxh3_hex,
)
from metaio.format.names import check_split_name
from metaio.format.shard_writer import ShardWriter, make_file_entry, map_file
from metaio.ragged import Ids, offsets, sum_rows


class WritePlan(NamedTuple):
    """The columns of a dataset, and how its episodes become files."""

    features: Features
    block_rows: int
    shard_blocks: int
    compact: bool


@dataclass(frozen=True)
class Provenance:
    """What the manifest says about where a dataset comes from."""

    task: str
    label: str
    seed: int = 0
    task_kind: str = "integer"
    protocol: str = ""
    recipe: dict[str, Any] | None = None


def slice_rows(rows: Rows, first: int, stop: int) -> Rows:
    """Return episodes [first, stop), as views."""
    # A portion is cut into many blocks, so nothing may be copied here.
    row_offsets = offsets(rows.row_lengths_T)
    value_offsets = offsets(sum_rows(rows.multi_lengths_NM))
    row = slice(int(row_offsets[first]), int(row_offsets[stop]))
    value = slice(int(value_offsets[row.start]), int(value_offsets[row.stop]))
    event_offsets = offsets(rows.num_events_T)
    event = slice(*event_offsets[[first, stop]]) if rows.num_events_T.size else slice(0)
    by_axis = {"T": slice(first, stop), "N": row, "V": value, "": event}
    # The shape suffix of a field tells its first axis: T episodes, N rows, V values, none events.
    suffixes = {field.name: field.name.rsplit("_", 1)[1] for field in fields(Rows)}
    axes = {name: suffix[:1] if suffix.isupper() else "" for name, suffix in suffixes.items()}
    return Rows(**{name: getattr(rows, name)[by_axis[axis]] for name, axis in axes.items()})


def concat_rows(parts: list[Rows]) -> Rows:
    """Return the episodes of all parts, in order."""
    return Rows(
        **{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Rows)}
    )


def find_block_bounds(
    row_lengths_T: npt.NDArray[np.int64], block_rows: int, bundle_tasks: int = 0
) -> list[int]:
    """Return the first episode of each block, then T; no block but of one episode (or bundle) has
    more than `block_rows` rows.

    >>> find_block_bounds(np.array([3, 3, 3, 9, 1]), 6)
    [0, 2, 3, 4, 5]"""
    ends_T = np.cumsum(row_lengths_T)
    # Greedy, from lengths alone: engines that see the same episodes cut the same blocks.
    cuts = [0]
    while cuts[-1] < len(row_lengths_T):
        start_row = ends_T[cuts[-1]] - row_lengths_T[cuts[-1]]
        stop = int(np.searchsorted(ends_T, start_row + block_rows, side="right"))
        num_tasks = max(stop - cuts[-1], 1)
        # Blocks hold complete bundles, except the last: then steps of complete bundles cut none.
        if bundle_tasks and stop < len(row_lengths_T):
            num_tasks = max(num_tasks - num_tasks % bundle_tasks, bundle_tasks)
        cuts.append(min(cuts[-1] + num_tasks, len(row_lengths_T)))
    return cuts


class SplitWriter:
    """Takes episodes in any portions and writes them as blocks of complete episodes."""

    def __init__(self, folder: Path, split: str, plan: WritePlan, bundle_tasks: int = 0) -> None:
        self._folder, self._split, self._plan = folder, split, plan
        self._bundle_tasks = bundle_tasks
        self._pending: list[Rows] = []
        self._pending_rows = 0
        self._shards: list[ShardEntry] = []
        self._tables: list[pa.Table] = []
        self._shard: ShardWriter | None = None

    def write(self, rows: Rows) -> None:
        """Append episodes; they stay in memory until their block is full."""
        self._pending.append(rows)
        # Cut at two blocks' worth: joining portions for each block would copy them twice.
        self._pending_rows += len(rows.label_N)
        if self._pending_rows >= 2 * self._plan.block_rows:
            self._write_pending(keep_last=True)

    def adopt_shard(self, entry: ShardEntry, block_table: pa.Table) -> int:
        """Add a shard whose files are written; return its index in stored order."""
        self._shards.append(entry)
        self._tables.append(block_table)
        return len(self._shards) - 1

    def end_shard(self) -> None:
        """Write what is pending and begin a new shard with the next episode."""
        self._write_pending(keep_last=False)
        self._close_shard()

    def finish(self) -> tuple[SplitEntry, pa.Table]:
        """Write the rest and the block table; return the manifest's entry and the block table."""
        self.end_shard()
        # A shard whose tasks were all dropped has no row, and lacks the columns of bundles.
        tables = [table for table in self._tables if table.num_rows]
        table = pa.concat_tables(tables or [make_block_table_schema().empty_table()])
        path = self._folder / self._split / BLOCK_TABLE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, write_statistics=False, store_schema=False)
        counted = "num_episodes", "num_rows", "num_values"
        num_episodes, num_rows, num_values = (int(np.sum(table[n].to_numpy())) for n in counted)
        file = make_file_entry(map_file(path))
        entry = SplitEntry(num_episodes, num_rows, num_values, file, tuple(self._shards))
        return entry, table

    def abort(self) -> None:
        """Close open files."""
        if self._shard is not None:
            self._shard.abort()

    def _write_pending(self, keep_last: bool) -> None:
        if not self._pending:
            return
        rows = concat_rows(self._pending)
        cuts = find_block_bounds(rows.row_lengths_T, self._plan.block_rows, self._bundle_tasks)
        # The last block may still grow, so it waits for more episodes.
        num_complete = cuts[:-1] if keep_last else cuts
        for first, stop in itertools.pairwise(num_complete):
            part = slice_rows(rows, first, stop)
            # Checked once, here: readers trust what passes its checksum.
            _check_rows(self._plan.features, part)
            shard = self._open_shard()
            shard.write(bundle_ids(build_block(self._plan.features, part), self._bundle_tasks))
            if shard.num_blocks >= self._plan.shard_blocks:
                self._close_shard()
        # The rest stays a view of the portion: it is copied once, with the next one.
        rest = slice_rows(rows, num_complete[-1], cuts[-1])
        self._pending = [rest] if len(rest.task_T) else []
        self._pending_rows = len(rest.label_N)

    def _open_shard(self) -> ShardWriter:
        if self._shard is None:
            features, compact = self._plan.features, self._plan.compact
            index = len(self._shards)
            self._shard = ShardWriter(self._folder, self._split, index, features, compact)
        return self._shard

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.adopt_shard(*self._shard.close())
            self._shard = None


def _check_rows(features: Features, rows: Rows) -> None:
    """Raise DataError for rows that no reader could use, such as ids outside their table."""
    if (rows.support_lengths_T > rows.row_lengths_T).any() or (rows.support_lengths_T < 0).any():
        raise DataError("an episode has more support rows than rows. This is a fault of the recipe")
    if (rows.row_lengths_T < 1).any():
        raise DataError("an episode has no rows. This is a fault of the recipe")
    if len(rows.row_id_N) != (len(rows.label_N) if features.row_id else 0):
        raise DataError(
            f"{len(rows.row_id_N):,} row ids for {len(rows.label_N):,} rows, and the features name "
            f"{features.row_id or 'no column of them'}. This is a fault of the recipe"
        )
    labels = rows.label_N.shape[1:] or (1,)
    num_weights = len(rows.label_N) if features.weight else 0
    if labels != (features.num_labels,) or len(rows.weight_N) != num_weights:
        raise DataError(
            f"{labels[0]} labels and {len(rows.weight_N):,} weights for {len(rows.label_N):,} rows"
            f", but the features have {features.num_labels} labels and "
            f"{features.weight or 'no column'} of weights. This is a fault of the recipe"
        )
    limits = {table.name: table.num_rows for table in features.tables}
    for index, feature in enumerate(features.single):
        _check_ids(feature.name, rows.ids_NF[:, index], limits[feature.table])
    owner_V = find_features_of_values(rows.multi_lengths_NM)
    for index, feature in enumerate(features.lists):
        _check_ids(feature.name, rows.multi_ids_V[owner_V == index], limits[feature.table])


def _check_ids(name: str, ids: Ids, num_rows: int) -> None:
    wrong = ids[(ids < 0) | (ids >= num_rows)]
    if len(wrong):
        raise DataError(
            f"feature {name} holds id {wrong[0]}, its table has ids 0 to {num_rows - 1}. "
            "Raise the table's rows, or let prepare hash the column into them"
        )


class DatasetWriter:
    """A dataset being written, made by `write_dataset`."""

    def __init__(
        self, folder: Path, is_local: bool, plan: WritePlan, provenance: Provenance
    ) -> None:
        self.folder = folder
        self.is_local = is_local  # whether `folder` itself becomes the dataset
        self.report: dict[str, Any] = {}
        self.stream: StreamPlace | None = None  # of an increment; its `resets` are found on disk
        self._plan, self._provenance = plan, provenance
        self._splits: dict[str, SplitWriter] = {}

    def split(self, name: str, bundle_tasks: int = 0) -> SplitWriter:
        """Return the writer of a split, made at its first use."""
        check_split_name(name)
        if bundle_tasks < 0:
            raise SchemaError(f"bundle_tasks is {bundle_tasks}; it must be at least 0. Raise it")
        # Every `bundle_tasks` episodes keep separate ids, and are shuffled together.
        if name not in self._splits:
            self._splits[name] = SplitWriter(self.folder, name, self._plan, bundle_tasks)
        return self._splits[name]

    def adopt_shard(self, split: str, entry: ShardEntry, block_table: pa.Table) -> None:
        """Add a shard that a thread or process has written, as the next of its split."""
        # Flushed now, while others are being built: at the end all of them would be waited for.
        index = self.split(split).adopt_shard(entry, block_table)
        if self.is_local:
            flush_to_disk(
                self.folder / s.path(split, index) for s in list_streams(self._plan.features)
            )

    def finish(self) -> None:
        """Write the manifest into the temporary folder."""
        entries, digest = {}, xxhash.xxh3_128()
        own = self._provenance
        digest.update(canonical_json([self._plan.features.to_json(), own.task, own.label]))
        if self.stream is not None:
            digest.update(canonical_json(self.stream.identity()))
        for name, split in self._splits.items():
            entries[name], table = split.finish()
            # Of decoded content: codec, block files and engine must not change the fingerprint.
            digest.update(name.encode() + table["content_xxh3"].to_numpy().tobytes())
        if raw_ids := self._make_entries(RAW_IDS_FOLDER):
            # In the report: earlier releases refuse a manifest with an unknown key.
            self.report = {**self.report, RAW_IDS_FOLDER: raw_ids}
        manifest = Manifest(
            **vars(own) | {"recipe": own.recipe or {}},
            features=self._plan.features,
            block_rows=self._plan.block_rows,
            splits=entries,
            fingerprint=digest.hexdigest(),
            recipe_xxh3=xxh3_hex(canonical_json(own.recipe or {})),
            vocabularies=self._make_entries(VOCABULARY_FOLDER),
            stream=self.stream and replace(self.stream, resets=self._make_entries(RESET_FOLDER)),
            report=json.loads(json.dumps(self.report, default=vars)),
            created_by={
                "python": sys.version.split()[0],
                "pyarrow": pa.__version__,
                "numpy": np.__version__,
            },
        )
        (self.folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
        if self.is_local:
            # Files first: the rename that commits must not reach the disk before what it names.
            folders = [self.folder, *(path for path in self.folder.iterdir() if path.is_dir())]
            flush_to_disk([*(f for own in folders for f in own.iterdir() if f.is_file()), *folders])

    def _make_entries(self, folder: str) -> dict[str, FileEntry]:
        """Return the files of a folder of tables, by table."""
        found = sorted((self.folder / folder).glob("*"))
        return {path.stem: make_file_entry(map_file(path)) for path in found}

    def abort(self) -> None:
        """Close open files."""
        for split in self._splits.values():
            split.abort()


@contextmanager
def write_dataset(
    out: str,
    features: Features,
    provenance: Provenance,
    *,
    block_rows: int = DEFAULT_BLOCK_ROWS,
    shard_blocks: int = DEFAULT_SHARD_BLOCKS,
    compact: bool = False,
    overwrite: bool = False,
) -> Iterator[DatasetWriter]:
    """Yield the writer of a dataset at the URL `out`, which appears if the block does not fail."""
    if block_rows < 1 or shard_blocks < 1:
        raise SchemaError(
            f"block_rows {block_rows} and shard_blocks {shard_blocks} must be at least 1. Raise "
            "them"
        )
    plan = WritePlan(features, block_rows, shard_blocks, compact)
    with open_destination(out, overwrite) as (folder, is_local):
        writer = DatasetWriter(folder, is_local, plan, provenance)
        try:
            yield writer
            writer.finish()
        finally:
            writer.abort()
