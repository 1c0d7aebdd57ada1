"""Sorts a bucket's rows by task, side, time, and what distinguishes the rows of a task.

Shape suffix: N rows"""

from typing import Any

import numpy as np
import numpy.typing as npt

from metaio.errors import DataError
from metaio.hashing import UInt64, splitmix64
from metaio.prepare.episodes.encoded_rows import EncodedRows
from metaio.prepare.schema.schema import Schema
from metaio.ragged import Int64, find_run_starts, places


def hash_row_identity(schema: Schema, rows: EncodedRows) -> UInt64:
    """Return what orders the rows of a task where nothing else does."""
    if schema.needs_input_order:
        return _hash_places(rows.task_hash_N, rows.row_hash_N, schema.seed)
    return rows.row_hash_N


def sort_rows(schema: Schema, rows: EncodedRows, identity_N: UInt64, by_windows: bool) -> Int64:
    """Return the order by task, side, time and row hash; rows equal in all of these are equal."""
    task_N = _rank_values(rows.task_hash_N)
    # Windows of time have sides by time, even where the train split is shuffled.
    if schema.is_shuffled and not by_windows:
        order_N = _sort_by_ranks(task_N, _rank_values(identity_N), rows.side_NS)
        _check_row_ids(schema, rows, order_N, np.flatnonzero(np.diff(task_N[order_N]) == 0))
        return order_N
    order_N = _sort_by_ranks(task_N, _rank_values(rows.time_N), rows.side_NS)
    # Few rows share task and time, so only those are sorted by their hash.
    same = np.diff(task_N[order_N]) == 0
    same &= np.diff(rows.time_N[order_N]) == 0
    if rows.side_NS.shape[1]:
        same &= np.diff(rows.side_NS[order_N, 0]) == 0
    in_run = np.zeros(len(order_N), dtype=np.bool_)
    in_run[1:] = same
    in_run[:-1] |= same
    places = np.flatnonzero(in_run)
    run = np.concatenate([[0], np.cumsum(~same)])[places]
    tied = order_N[places]
    order_N[places] = tied[np.lexsort((identity_N[tied], run))]
    _check_row_ids(schema, rows, order_N, np.flatnonzero(same))
    return order_N


def _hash_places(task_hash_N: UInt64, place_N: UInt64, seed: int) -> UInt64:
    """Return a hash of each row's task and of its place among the task's rows in the input."""
    # One machine leaves all places 0: its rows come in order, and the stable sort keeps it.
    order_N = np.argsort(place_N, kind="stable") if place_N.any() else np.arange(len(place_N))
    order_N = order_N[np.argsort(task_hash_N[order_N], kind="stable")]
    ordered = task_hash_N[order_N]
    starts = np.flatnonzero(find_run_starts(ordered))
    place = places(np.diff(starts, append=len(ordered)))
    hash_N = np.empty_like(task_hash_N)
    mixed = splitmix64(ordered ^ splitmix64(np.uint64(seed)))
    # Of task, seed and place alone: added or removed features move no row to another side.
    hash_N[order_N] = splitmix64(mixed + place.astype(np.uint64))
    return hash_N


def _check_row_ids(
    schema: Schema, rows: EncodedRows, order_N: Int64, places: npt.NDArray[np.intp]
) -> None:
    """Raise DataError where a row and the next one of its task have one row id."""
    if schema.row_id is None:
        return
    hash_N = rows.row_hash_N[order_N]
    twice = places[hash_N[places] == hash_N[places + 1]]
    if len(twice):
        raise DataError(
            f"task {rows.task_N[order_N[twice[0]]]} has two rows of the same "
            f"{schema.row_id.column}; as [row_id] it must tell the rows of a task apart. Correct "
            "the column, or name another one"
        )


def _rank_values(values_N: npt.NDArray[Any]) -> Int64:
    """Return dense ranks: 0 for the least value; equal values share a rank."""
    order_N = np.argsort(values_N)
    ordered = values_N[order_N]
    ranks_N = np.empty(len(values_N), dtype=np.int64)
    ranks_N[order_N] = np.cumsum(find_run_starts(ordered)) - 1
    return ranks_N


def _sort_by_ranks(first_N: Int64, then_N: Int64, side_NS: npt.NDArray[np.int8]) -> Int64:
    # One 64-bit key sorts (AVX2, AVX-512) four times as fast as two. Sides lie between: a bucket
    # has far less than 2^30 rows.
    key_N = (first_N << 32) | then_N
    if side_NS.shape[1]:
        key_N |= side_NS[:, 0].astype(np.int64) << 30
    order: Int64 = np.argsort(key_N)
    return order
