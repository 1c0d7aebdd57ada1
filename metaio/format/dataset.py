"""Opens a prepared dataset and reads one block at a time, each checked at its first read.

Shape suffixes: B tables, E chosen episodes, Z blocks"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaio.errors import REMEDY, FormatError, NoDatasetError, make_content_error
from metaio.format.block import Block
from metaio.format.block_table import BlockTable, read_block_table
from metaio.format.decode import RowGroup, assemble_block, check_counts, check_num_rows, read_footer
from metaio.format.features import Features
from metaio.format.layout import (
    BLOCK_TABLE_NAME,
    MANIFEST_NAME,
    RAW_IDS_FOLDER,
    RESET_FOLDER,
    VOCABULARY_FOLDER,
    find_chunk_ranges,
    list_checksum_columns,
    list_streams,
)
from metaio.format.manifest import (
    MIN_FOOTER_BYTES,
    FileEntry,
    Manifest,
    ShardEntry,
    decode_manifest,
    xxh3_hex,
)
from metaio.format.names import NAME_RULE, is_name
from metaio.format.storage import ByteRange, Storage
from metaio.ragged import Int32, Int64, offsets


@dataclass(frozen=True)
class Split:
    """One split of a dataset: its counts, its shards and where its blocks are."""

    name: str
    num_episodes: int
    num_rows: int
    num_values: int
    shards: tuple[ShardEntry, ...]
    blocks: BlockTable

    @property
    def num_blocks(self) -> int:
        """Return the number of row groups of all shards."""
        return len(self.blocks.shard_Z)

    @cached_property
    def episode_offsets(self) -> Int64:
        """Return the first episode of each block, then the number of episodes."""
        return offsets(self.blocks.num_episodes_Z)

    @cached_property
    def first_block(self) -> Int64:
        """Return the first block of each shard, then the number of blocks."""
        return offsets([shard.num_blocks for shard in self.shards])


class Dataset:
    """A prepared dataset. Opening reads manifest and block tables, not blocks. Thread-safe."""

    def __init__(self, storage: Storage, manifest: Manifest, splits: Mapping[str, Split]) -> None:
        self.manifest = manifest
        self._seen: Callable[[Block], Block] | None = None  # applied to each block that is read
        draws_negatives = "negatives" in (manifest.recipe.get("schema") or ())
        self.features = replace(manifest.features, draws_negatives=draws_negatives)
        self.task = manifest.task
        self.label = manifest.label
        self.fingerprint = manifest.fingerprint
        self.splits: Mapping[str, Split] = MappingProxyType(dict(splits))
        self._storage = storage
        self._streams = list_streams(manifest.features)
        self._metadata: dict[tuple[str, int], list[pq.FileMetaData]] = {}
        # A lock for each shard, so that readers of other shards do not wait.
        self._footer_locks: dict[tuple[str, int], threading.Lock] = {}
        self._verified: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Return where the dataset was opened."""
        return self._storage.url

    @property
    def is_local(self) -> bool:
        """Return whether blocks come from a local file system, at no latency."""
        return self._storage.is_local

    def split(self, name: str) -> Split:
        """Return the split of that name."""
        if name not in self.splits:
            raise FormatError(
                f"{self.url} has no split {name}; it has {', '.join(self.splits)}. "
                "Choose one of them, or prepare it"
            )
        return self.splits[name]

    def with_features(self, features: Features, translate: Callable[[Block], Block]) -> "Dataset":
        """Return the same dataset with these tables; `translate` is applied to each block read."""
        other = Dataset(self._storage, self.manifest, self.splits)
        other.features, other._seen = features, translate
        return other

    def block_bytes(self, split: str) -> Int64:
        """Return the decoded size of each block [Z], in bytes, from counts alone."""
        features, table = self.features, self.split(split).blocks
        # As Block holds them: 4 bytes a number of a row, four int64 an episode, 8 bytes an id.
        num_numbers = features.num_labels + bool(features.weight) + len(features.dense)
        per_row = 4 * (num_numbers + len(features.sparse)) + (8 if features.row_id else 0)
        sizes: Int64 = (
            table.num_rows_Z * per_row + table.num_episodes_Z * 32 + table.num_values_Z * 4
        )
        sizes += 8 * table.unique_lengths_ZB.sum(axis=1)
        return sizes

    def files(self) -> Iterator[tuple[str, FileEntry]]:
        """Yield the path below the dataset and manifest entry of every file but the manifest."""
        yield from (
            (f"{VOCABULARY_FOLDER}/{n}.parquet", e) for n, e in self.manifest.vocabularies.items()
        )
        if self.manifest.stream is not None:
            resets = self.manifest.stream.resets
            yield from ((f"{RESET_FOLDER}/{name}.parquet", entry) for name, entry in resets.items())
        yield from ((f"{RAW_IDS_FOLDER}/{n}.parquet", e) for n, e in self.manifest.raw_ids.items())
        for name, split in self.manifest.splits.items():
            yield f"{name}/{BLOCK_TABLE_NAME}", split.block_table
            for index, shard in enumerate(split.shards):
                yield from ((s.path(name, index), shard.files[s.name]) for s in self._streams)

    def read_file(self, path: str, most: int | None = None) -> bytes:
        """Return the bytes of a file below the dataset, unchecked; of a longer one than `most`
        only one more."""
        return self._storage.read(path, most)

    def read_block(self, split: str, block: int) -> Block:
        """Return a decoded block. Checksums are verified at its first read, remote ones at each."""
        entry = self.split(split)
        shard = int(entry.blocks.shard_Z[block])
        row_group = block - int(entry.first_block[shard])
        # A remote read may go wrong each time, and checking costs little beside the transfer.
        with self._lock:
            verify = not self.is_local or (split, block) not in self._verified
        groups = self._row_groups(split, shard, row_group)
        # Block tables hold one list for all files of a shard, ordered as list_checksum_columns
        # says.
        checksums = iter(entry.blocks.xxh3_Z[block].tolist())
        columns = {}
        bundles = entry.blocks.bundles(block)
        for stream, group in zip(self._streams, groups, strict=True):
            if verify:  # just before they are decoded: the bytes come from the cache then
                group.check([next(checksums) for _ in group.ranges])
            # Arrays in place may be unaligned, hence slow: fine for bundles, which are copied only
            # once.
            in_place = bundles is not None and self._seen is None
            columns[stream.name] = group.decode(in_place)
        place = f"{self.url}, split {split}, block {block}"
        try:
            lengths_B = entry.blocks.unique_lengths_ZB[block]
            decoded = assemble_block(self.manifest.features, columns, lengths_B, bundles)
        except ValueError as error:
            raise make_content_error(f"{place}: {error}") from error
        if verify:
            table = entry.blocks
            counts = (table.num_episodes_Z, table.num_rows_Z, table.num_values_Z)
            own = (int(counts_Z[block]) for counts_Z in counts)
            check_counts(place, self.manifest.features, decoded, *own)
            # Only now: a block that failed a check is checked again.
            with self._lock:
                self._verified.add((split, block))
        return decoded if self._seen is None else self._seen(decoded)

    def read_num_rows(self, split: str, blocks: Sequence[int]) -> list[Int32]:
        """Return the rows of each episode of these blocks. Of their files this column alone is
        read, of all blocks at once, and verified."""
        stream, table = self._streams[0], self.split(split).blocks
        column = stream.schema.get_field_index("num_rows")
        groups, ranges = [], []
        for block in blocks:
            shard = int(table.shard_Z[block])
            row_group = block - int(self.splits[split].first_block[shard])
            metadata, *_ = self._shard_metadata(split, shard)
            groups.append((row_group, metadata))
            num_bytes = self.splits[split].shards[shard].files[stream.name].num_bytes
            chunk = find_chunk_ranges(metadata, row_group)[column]
            ranges.append(ByteRange(stream.path(split, shard), num_bytes, *chunk))
        windows = self._storage.read_windows(ranges)
        found = []
        for block, own, window, of_file in zip(blocks, ranges, windows, groups, strict=True):
            name, chunk = self._storage.name(own.path), (own.begin, own.end)
            group = RowGroup(name, *of_file, window, [chunk], [column])
            # The columns of the episodes stand first in list_checksum_columns.
            group.check([int(table.xxh3_Z[block, column])])
            num_rows_E = group.decode(in_place=True)[0].astype(np.int32)  # no view of the file
            place = f"{self.url}, split {split}, block {block}"
            counts = int(table.num_episodes_Z[block]), int(table.num_rows_Z[block])
            check_num_rows(place, num_rows_E, *counts)
            found.append(num_rows_E)
        return found

    def _row_groups(self, split: str, shard: int, row_group: int) -> list[RowGroup]:
        """Return the bytes of a row group in the file of each stream, fetched together."""
        metadata = self._shard_metadata(split, shard)
        paths, entries = self._files_of_shard(split, shard)
        # A row group's chunks lie side by side, so one range a file brings them all.
        ranges = [find_chunk_ranges(own, row_group) for own in metadata]
        wanted = [
            ByteRange(path, file.num_bytes, own[0][0], own[-1][1])
            for path, file, own in zip(paths, entries, ranges, strict=True)
        ]
        windows = self._storage.read_windows(wanted)
        return [
            RowGroup(self._storage.name(path), row_group, own, window, chunks, range(len(chunks)))
            for path, own, window, chunks in zip(paths, metadata, windows, ranges, strict=True)
        ]

    def _files_of_shard(self, split: str, shard: int) -> tuple[list[str], list[FileEntry]]:
        """Return the path and the manifest entry of the file of each stream."""
        files = self.splits[split].shards[shard].files
        paths = [stream.path(split, shard) for stream in self._streams]
        return paths, [files[stream.name] for stream in self._streams]

    def _shard_metadata(self, split: str, shard: int) -> list[pq.FileMetaData]:
        """Return the footers of a shard's files, read and checked once."""
        key, num_blocks = (split, shard), self.splits[split].shards[shard].num_blocks
        with self._lock:
            one_reader = self._footer_locks.setdefault(key, threading.Lock())
        with one_reader:  # others of this shard wait: from a store each would fetch them anew
            if key not in self._metadata:
                files = self._files_of_shard(split, shard)
                self._metadata[key] = self._read_footers(num_blocks, *files)
            return self._metadata[key]

    def _read_footers(
        self, num_blocks: int, paths: list[str], entries: list[FileEntry]
    ) -> list[pq.FileMetaData]:
        ranges = [
            ByteRange(path, file.num_bytes, file.num_bytes - file.footer_bytes, file.num_bytes)
            for path, file in zip(paths, entries, strict=True)
        ]
        found = []
        windows = self._storage.read_windows(ranges)
        parts = zip(self._streams, ranges, entries, windows, strict=True)
        for stream, own, file, window in parts:
            name, footer = self._storage.name(own.path), window.view(own.begin, own.end)
            if xxh3_hex(footer) != file.footer_xxh3:
                raise FormatError(
                    f"{name}: the footer differs from the checksum in the manifest. {REMEDY}"
                )
            found.append(read_footer(name, footer, stream, num_blocks, file.num_bytes))
        return found


def open_dataset(url: str, damaged: list[str] | None = None) -> Dataset:
    """Return the dataset at a path or URL; with a list `damaged`, broken splits are noted there."""
    storage = Storage(url)
    try:
        raw = storage.read(MANIFEST_NAME)
    except FormatError as error:
        # Only a missing manifest means that there is no dataset; else permissions or network
        # failed.
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise NoDatasetError(
                f"{url} holds no dataset: {MANIFEST_NAME} is missing. "
                "Give a folder that gmeta prepare made"
            ) from error
        raise
    manifest = decode_manifest(raw, storage.name(MANIFEST_NAME))
    _check_manifest(manifest, storage.name(MANIFEST_NAME))
    columns = list_checksum_columns(manifest.features)
    splits = {}
    for name, entry in manifest.splits.items():
        path = f"{name}/{BLOCK_TABLE_NAME}"
        try:
            table = read_block_table(storage, path, entry, manifest.features, len(columns))
        except FormatError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
            continue
        counts = (entry.num_episodes, entry.num_rows, entry.num_values)
        splits[name] = Split(name, *counts, entry.shards, table)
    return Dataset(storage, manifest, splits)


def _check_manifest(manifest: Manifest, name: str) -> None:
    """Raise FormatError for unsafe names, and for files and counts that contradict each other."""
    # A right checksum proves nothing about names that somebody chose, and they become paths.
    named: dict[str, Mapping[str, object]] = {
        "splits": manifest.splits,
        "vocabularies": manifest.vocabularies,
    }
    if manifest.stream is not None:
        named["stream.resets"] = manifest.stream.resets
    for key, names in named.items():
        for own in names:
            if not is_name(own):
                raise make_content_error(
                    f"{name}: {key} has the name {own!r}; allowed are {NAME_RULE}"
                )
    try:
        _ = manifest.raw_ids  # checked as it is read
        manifest.features.check()
    except ValueError as error:
        raise make_content_error(f"{name}: {error}") from error
    wanted = {stream.name for stream in list_streams(manifest.features)}
    for split, entry in manifest.splits.items():
        for index, shard in enumerate(entry.shards):
            place = f"{name}: shard {index} of split {split}"
            if shard.files.keys() != wanted:
                raise make_content_error(f"{place} must have the files {', '.join(sorted(wanted))}")
            for stream, file in shard.files.items():
                if not MIN_FOOTER_BYTES <= file.footer_bytes <= file.num_bytes:
                    raise make_content_error(
                        f"{place}: {stream} cannot have {file.footer_bytes} footer bytes"
                    )


def read_verified_file(dataset: Dataset, path: str, entry: FileEntry) -> bytes:
    """Return the bytes of a file whose size and checksum are those of the manifest."""
    data = dataset.read_file(path, entry.num_bytes)
    if len(data) != entry.num_bytes or xxh3_hex(data) != entry.xxh3:
        raise FormatError(
            f"{dataset.url}/{path}: {len(data)} bytes that differ from the checksum in the "
            f"manifest, which lists {entry.num_bytes} bytes. {REMEDY}"
        )
    return data


def read_column(
    dataset: Dataset, path: str, entry: FileEntry, name: str, kind: pa.DataType | None = None
) -> pa.Array:
    """Return a column of a small, verified Parquet file, cast to `kind` if that is given."""
    content = read_verified_file(dataset, path, entry)
    try:
        column = pq.read_table(pa.BufferReader(content))[name].combine_chunks()
        if kind is not None:
            column = column.cast(kind)
            if column.null_count:
                raise pa.ArrowInvalid(f"{column.null_count} values are missing")
        return column
    except (pa.ArrowException, OSError, KeyError) as error:
        raise make_content_error(
            f"{dataset.url}/{path} has no column {name} to read: {error}"
        ) from error
