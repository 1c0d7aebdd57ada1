"""A block: the episodes of one Parquet row group, with the distinct ids of each table stored once.

In a split of bundles (consecutive episodes) ids are distinct in each bundle instead: a step made of
bundles then copies them, and looks no position up.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, B tables, U unique ids"""

import itertools
import threading
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from metaio.format.features import Features
from metaio.ragged import Float32, Ids, Int32, Int64, offsets, sum_rows

# Marking used ids costs about 1 ns an id of the table, sorting about 5 ns an id of the block.
_MARK_RATIO = 4
# The array that ranks ids is kept by each thread; above 1 GB of int32 np.unique ranks them.
_MAX_RANKED_IDS = 1 << 28
# Measured: all sizes from 256 to 16,384 rows are equally fast.
_ROWS_AT_ONCE = 1_024
# One scratch array a thread, as several build and compose blocks at once.
_THREAD_LOCAL = threading.local()


def make_no_row_ids() -> Int64:
    """Return the row ids [0] of a dataset without a column of them."""
    return np.zeros(0, dtype=np.int64)


def make_no_weights() -> Float32:
    """Return the weights [0] of a dataset without a column of them."""
    return np.zeros(0, dtype=np.float32)


def make_no_counts() -> Int32:
    """Return the numbers of known events [0] of a dataset without events."""
    return np.zeros(0, dtype=np.int32)


def make_no_numbers() -> Float32:
    """Return the numbers of events [0, 0] of a dataset without events."""
    return np.zeros((0, 0), dtype=np.float32)


def make_no_events() -> Int64:
    """Return the number of events of each episode [0] of a dataset without events."""
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Rows:
    """Episodes with raw table ids, before deduplication: what a writer takes."""

    task_T: Int64
    row_lengths_T: Int64
    # The first rows of each episode; the others are query rows.
    support_lengths_T: Int64
    # [N, labels] if there are several; NaN: not known.
    label_N: Float32
    dense_NK: Float32
    ids_NF: Ids
    # Row by row, and within a row feature by feature.
    multi_ids_V: Ids
    multi_lengths_NM: Int32
    row_id_N: Int64 = field(default_factory=make_no_row_ids)
    weight_N: Float32 = field(default_factory=make_no_weights)
    # Of a dataset with events: how many each episode has, what they are beside their ids, and how
    # many of them each row knows. Their ids are lists of the episode's first row.
    num_events_T: Int64 = field(default_factory=make_no_events)
    event_numbers: Float32 = field(default_factory=make_no_numbers)
    events_before_N: Int32 = field(default_factory=make_no_counts)


@dataclass(frozen=True)
class Bundles:
    """The ids of a block by bundles of `num_tasks` episodes: of each table one range a bundle."""

    num_tasks: int
    # Ranges of two bundles never overlap: an id that both use is stored twice.
    bundle_starts: Int64  # [bundles, B]
    bundle_lengths: Int64


@dataclass(frozen=True)
class Block:
    """A decoded row group. Read-only: batches may share its memory."""

    task_T: Int64
    row_offsets_T1: Int64
    support_lengths_T: Int64
    value_offsets_T1: Int64
    label_N: Float32
    dense_NK: Float32
    positions_NF: Int32
    multi_positions_V: Int32
    multi_lengths_NM: Int32
    # Table by table; an id stands once, or once for each bundle that uses it.
    unique_ids_U: Int64
    unique_offsets_B1: Int64
    row_id_N: Int64 = field(default_factory=make_no_row_ids)
    weight_N: Float32 = field(default_factory=make_no_weights)
    num_events_T: Int64 = field(default_factory=make_no_events)
    event_numbers: Float32 = field(default_factory=make_no_numbers)
    events_before_N: Int32 = field(default_factory=make_no_counts)
    bundles: Bundles | None = None

    @property
    def num_episodes(self) -> int:
        """Return T."""
        return len(self.task_T)

    @property
    def num_rows(self) -> int:
        """Return N."""
        return len(self.label_N)

    @property
    def nbytes(self) -> int:
        """Return the memory held, in bytes."""
        return sum(array.nbytes for array in _list_arrays(self))


def find_features_of_values(multi_lengths_NM: Int32) -> Int64:
    """Return the feature index [V] of each id of a row-by-row, feature-by-feature list."""
    num_rows, num_multi = multi_lengths_NM.shape
    features_V: Int64 = np.repeat(np.tile(np.arange(num_multi), num_rows), multi_lengths_NM.ravel())
    return features_V


def merge_unknown_ids(
    ids_U: Int64, is_unknown_U: npt.NDArray[np.bool_], table_U: Int64, num_tables: int
) -> tuple[Int64, Int64, Int32]:
    """Return ids with marked ones as row 0, their count by table, and each old id's position."""
    # An episode must not hold an id at two positions: the first unknown id stands for all.
    tables, first = np.unique(table_U[is_unknown_U], return_index=True)
    shared_B = np.zeros(num_tables, dtype=np.int64)
    shared_B[tables] = np.flatnonzero(is_unknown_U)[first]
    target_U = np.where(is_unknown_U, shared_B[table_U], np.arange(len(ids_U)))
    keep_U = target_U == np.arange(len(ids_U))
    position_U = (np.cumsum(keep_U) - 1)[target_U].astype(np.int32)
    kept_U = np.where(is_unknown_U, 0, ids_U)[keep_U]
    return kept_U, np.bincount(table_U[keep_U], minlength=num_tables), position_U


def build_block(features: Features, rows: Rows) -> Block:
    """Replace ids by positions into the sorted unique ids of their table, tables concatenated."""
    multi_of_V = find_features_of_values(rows.multi_lengths_NM)
    # Feature-major: numpy reads every 26th number several times slower than neighbours.
    ids_FN = np.empty(rows.ids_NF.shape[::-1], dtype=rows.ids_NF.dtype)
    _transpose_into(rows.ids_NF, ids_FN.T)
    positions_FN = np.empty(ids_FN.shape, dtype=np.int32)
    multi_positions_V = np.empty(rows.multi_ids_V.shape, dtype=np.int32)
    uniques: list[Int64] = [np.zeros(0, dtype=np.int64)]
    # Table by table, because ids mean something within their table only.
    base = 0
    for table in features.tables:
        columns = [i for i, feature in enumerate(features.single) if feature.table == table.name]
        values = [
            np.flatnonzero(multi_of_V == i)
            for i, feature in enumerate(features.lists)
            if feature.table == table.name
        ]
        parts = [ids_FN[column] for column in columns]
        parts += [rows.multi_ids_V[own] for own in values]
        unique, ranks = _rank_ids(parts, table.num_rows, base)
        for column, rank in zip(columns, ranks, strict=False):
            positions_FN[column] = rank
        for own, rank in zip(values, ranks[len(columns) :], strict=True):
            multi_positions_V[own] = rank
        uniques.append(unique)
        base += len(unique)
    positions_NF = np.empty(rows.ids_NF.shape, dtype=np.int32)
    _transpose_into(positions_FN.T, positions_NF)
    row_offsets_T1 = offsets(rows.row_lengths_T)
    return Block(
        task_T=rows.task_T,
        row_offsets_T1=row_offsets_T1,
        support_lengths_T=rows.support_lengths_T,
        value_offsets_T1=offsets(sum_rows(rows.multi_lengths_NM))[row_offsets_T1],
        label_N=rows.label_N,
        dense_NK=rows.dense_NK,
        positions_NF=positions_NF,
        multi_positions_V=multi_positions_V,
        multi_lengths_NM=rows.multi_lengths_NM,
        unique_ids_U=np.concatenate(uniques),
        unique_offsets_B1=offsets([len(unique) for unique in uniques[1:]]),
        row_id_N=rows.row_id_N,
        weight_N=rows.weight_N,
        num_events_T=rows.num_events_T,
        event_numbers=rows.event_numbers,
        events_before_N=rows.events_before_N,
    )


def _transpose_into(source_N: Ids, target_N: Ids) -> None:
    """Copy a matrix with many rows into the transpose of another, or the other way round."""
    # A few rows at a time stay in the cache while each of their features is picked out: up to 2.5
    # times as fast as one copy of everything.
    for first in range(0, len(source_N), _ROWS_AT_ONCE):
        target_N[first : first + _ROWS_AT_ONCE] = source_N[first : first + _ROWS_AT_ONCE]


def _rank_ids(
    parts: list[Ids], num_ids: int, base: int
) -> tuple[Int64, list[npt.NDArray[np.integer[Any]]]]:
    """Return the sorted distinct ids of all parts, and each part as `base` + index into them."""
    joined = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    bounds = offsets([len(part) for part in parts]).tolist()
    if num_ids > _MAX_RANKED_IDS:
        distinct, ranks = np.unique(joined, return_inverse=True)
        ranks = ranks + base
    else:
        distinct = find_distinct(num_ids, joined)
        rank_of = borrow_scratch(num_ids)
        rank_of[distinct] = np.arange(base, base + len(distinct), dtype=np.int32)
        # Ranks exist for all ids, so no index is out of range: "clip" spares numpy the check.
        ranks = np.take(rank_of, joined, mode="clip")
    return distinct, [ranks[first:stop] for first, stop in itertools.pairwise(bounds)]


def find_distinct(bound: int, *parts: npt.NDArray[np.integer[Any]]) -> Int64:
    """Return the distinct values of all parts, ascending; each is in [0, bound), and below 2^31."""
    count = sum(part.size for part in parts)
    if bound <= _MARK_RATIO * count:
        mark = np.zeros(bound, dtype=np.bool_)
        for part in parts:
            mark[part] = True
        return np.flatnonzero(mark)
    # Few of many: 32-bit integers sort several times as fast as 64-bit ones, and np.unique hashes.
    values = np.concatenate([part.ravel() for part in parts]).astype(np.int32)
    values.sort()
    first = np.empty(len(values), dtype=np.bool_)
    first[:1] = True
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first].astype(np.int64)


def borrow_scratch(length: int) -> Int32:
    """Return an array of this thread, at least that long, with any content."""
    # A megabyte of fresh memory for each block would cost more in page faults than the work in it.
    kept: Int32 | None = getattr(_THREAD_LOCAL, "array", None)
    if kept is None or len(kept) < length:
        kept = _THREAD_LOCAL.array = np.empty(length, dtype=np.int32)
    return kept


def find_bundle_bounds(num_episodes: int, num_tasks: int) -> Int64:
    """Return the first episode of each bundle, then T; the last bundle may be smaller.

    >>> find_bundle_bounds(7, 3).tolist()
    [0, 3, 6, 7]"""
    return np.append(np.arange(0, num_episodes, num_tasks), num_episodes)


def make_bundles(num_tasks: int, bundle_lengths: Int64) -> Bundles:
    """Return bundles of `num_tasks` episodes, given how many ids of each table they use."""
    # Ids are stored table by table, and within a table bundle by bundle.
    starts = offsets(bundle_lengths.T.ravel())[:-1].reshape(bundle_lengths.T.shape)
    return Bundles(num_tasks, starts.T, bundle_lengths)


def bundle_ids(block: Block, num_tasks: int) -> Block:
    """Return the block with separate ids for every `num_tasks` episodes; unchanged for 0."""
    if not num_tasks or len(block.unique_offsets_B1) == 1:
        return block
    bounds = find_bundle_bounds(block.num_episodes, num_tasks)
    bundle_rows = _list_slices(block.row_offsets_T1[bounds])
    bundle_values = _list_slices(block.value_offsets_T1[bounds])
    num_ids = len(block.unique_ids_U)
    # Without tables there are no ids to bundle.
    used = [
        find_distinct(num_ids, block.positions_NF[rows], block.multi_positions_V[values])
        for rows, values in zip(bundle_rows, bundle_values, strict=True)
    ]
    lengths = [np.diff(np.searchsorted(positions, block.unique_offsets_B1)) for positions in used]
    bundle_lengths = np.array(lengths, dtype=np.int64).reshape(-1, len(block.unique_offsets_B1) - 1)
    bundles = make_bundles(num_tasks, bundle_lengths)
    ids_U = np.empty(bundle_lengths.sum(), dtype=np.int64)
    positions_NF = np.empty_like(block.positions_NF)
    multi_V = np.empty_like(block.multi_positions_V)
    new_U = borrow_scratch(len(block.unique_ids_U))
    for index, positions in enumerate(used):
        # Within a table all ids of a bundle move by the same distance.
        is_used_B, rows, values = bundle_lengths[index], bundle_rows[index], bundle_values[index]
        new = np.arange(len(positions)) + np.repeat(
            bundles.bundle_starts[index] - offsets(is_used_B)[:-1], is_used_B
        )
        ids_U[new] = block.unique_ids_U[positions]
        new_U[positions] = new
        positions_NF[rows] = new_U[block.positions_NF[rows]]
        multi_V[values] = new_U[block.multi_positions_V[values]]
    return replace(
        block,
        positions_NF=positions_NF,
        multi_positions_V=multi_V,
        unique_ids_U=ids_U,
        unique_offsets_B1=offsets(bundle_lengths.sum(axis=0)),
        bundles=bundles,
    )


def are_positions_valid(features: Features, block: Block) -> bool:
    """Return whether every position points to an id of its feature's table, in its own bundle."""
    table_F, table_M = features.table_of_single, features.table_of_lists
    all_lengths_B = np.diff(block.unique_offsets_B1)
    bundles = block.bundles or make_bundles(max(block.num_episodes, 1), all_lengths_B[None])
    bounds = find_bundle_bounds(block.num_episodes, bundles.num_tasks)
    bundle_rows = _list_slices(block.row_offsets_T1[bounds])
    bundle_values = _list_slices(block.value_offsets_T1[bounds])
    for index, (rows, values) in enumerate(zip(bundle_rows, bundle_values, strict=True)):
        starts_B = bundles.bundle_starts[index].astype(np.int32)
        lengths_B = bundles.bundle_lengths[index]
        table_V = table_M[find_features_of_values(block.multi_lengths_NM[rows])]
        multi_V = block.multi_positions_V[values]
        for position, table in ((block.positions_NF[rows], table_F), (multi_V, table_V)):
            # One comparison checks both bounds: before the start the unsigned difference is huge.
            place = (position - starts_B[table]).view(np.uint32)
            if not (place < lengths_B[table].astype(np.uint32)).all():
                return False
    return True


def _list_slices(firsts: Int64) -> list[slice]:
    """Return the slice of rows (or values) of each bundle."""
    bounds = firsts.tolist()
    return [slice(first, stop) for first, stop in itertools.pairwise(bounds)]


def hash_content(block: Block) -> int:
    """Return xxh3_64 of the decoded arrays in field order."""
    # Of arrays, not files: another writer or codec may store equal content in other bytes.
    digest = xxhash.xxh3_64()
    for array in _list_arrays(block):
        digest.update(np.ascontiguousarray(array).data)
    return digest.intdigest()


def _list_arrays(block: Block) -> list[npt.NDArray[np.generic]]:
    """Return the decoded arrays in field order, bundles left out: they are layout, not content."""
    values = (getattr(block, own.name) for own in fields(block))
    return [value for value in values if isinstance(value, np.ndarray)]
