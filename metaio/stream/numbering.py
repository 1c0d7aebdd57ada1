"""Gives values their table rows, in the order of admission: appended or reused, never moved.

Shape suffixes: N rows, V values, U unique ids, R rows of tables"""

# A value gets its row by (time of its k-th occurrence in training rows, value), so that it does not
# matter where the log was cut into increments; rarer values are counted on.
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.hashing import UInt64, splitmix64
from metaio.prepare.schema.values import hash_values, infer_kind
from metaio.ragged import Int64, index_entries, offsets, places


@dataclass(frozen=True)
class Occurrences:
    """The distinct values of some rows, with the first times that may admit them, and the last."""

    values: pa.Array  # [V], of one type, no nulls
    lengths_V: Int64  # how many times of each value
    times: Int64  # value by value
    last_V: Int64

    @classmethod
    def of(cls, values: pa.Array, times_N: Int64, admission: int) -> "Occurrences":
        """Return the occurrences of a batch's values, each with its time."""
        return _reduce_occurrences(
            values, np.ones(len(times_N), np.int64), times_N, times_N, admission
        )

    def deal(self, num_parts: int) -> list[tuple[int, "Occurrences"]]:
        """Return the values of each of `num_parts` parts that has any."""
        # By the value's hash, so that every worker sends a value to the same part.
        part_V = (_hash_values(self.values) % np.uint64(num_parts)).astype(np.int64)
        offsets_V1 = offsets(self.lengths_V)
        found = []
        for part in np.unique(part_V).tolist():
            own = np.flatnonzero(part_V == part)
            times = self.times[index_entries(offsets_V1, own)]
            values = self.values.take(pa.array(own))
            found.append((part, Occurrences(values, self.lengths_V[own], times, self.last_V[own])))
        return found


def merge_occurrences(parts: list[Occurrences], admission: int) -> Occurrences:
    """Return the occurrences of all parts together; there is at least one."""
    return _reduce_occurrences(
        pa.concat_arrays([part.values for part in parts]),
        np.concatenate([part.lengths_V for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.last_V for part in parts]),
        admission,
    )


def _reduce_occurrences(
    values: pa.Array, lengths_N: Int64, times: Int64, last_N: Int64, admission: int
) -> Occurrences:
    encoded = pc.dictionary_encode(values)
    code_N = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    distinct = len(encoded.dictionary)
    code = np.repeat(code_N, lengths_N)
    order = np.lexsort((times, code))
    counts_V = np.bincount(code, minlength=distinct)
    # Times behind the one that admits a value say nothing, so they are cut.
    rank = places(counts_V)
    by_code = np.argsort(code_N, kind="stable")
    starts_V = offsets(np.bincount(code_N, minlength=distinct))[:-1]
    # reduceat fails without a segment.
    last_V = np.maximum.reduceat(last_N[by_code], starts_V) if distinct else last_N
    kept = order[rank < admission]
    return Occurrences(encoded.dictionary, np.minimum(counts_V, admission), times[kept], last_V)


@dataclass(frozen=True)
class Numbering:
    """The state of one table, sorted by the hashes of the values; it is a `RowIndex`."""

    num_rows: int
    hash_U: UInt64
    values: pa.Array
    row_U: Int64
    count_U: Int64  # occurrences, as long as it waits
    last_U: Int64  # time of the last occurrence

    @classmethod
    def empty(cls, value_type: pa.DataType) -> "Numbering":
        """Return the state of a table without values."""
        none = np.zeros(0, np.int64)
        return cls(0, none.view(np.uint64), pa.array([], value_type), none, none, none)

    def rows(self, column: pa.Array) -> Int64:
        """Return the row of each value [N], 0 for unknown ones; no nulls."""
        if not len(self.row_U):
            return np.zeros(len(column), np.int64)
        place_N = self.find(self._cast_values(column))
        # Rows that are merely reserved are negative: their values are unknown until they return.
        return np.where(place_N >= 0, np.maximum(self.row_U[place_N], 0), 0)

    def _cast_values(self, column: pa.Array) -> pa.Array:
        """Return values of a batch in the type of the table's."""
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column if column.type.equals(self.values.type) else column.cast(self.values.type)

    def find(self, values: pa.Array) -> Int64:
        """Return the entry of each value, -1 where there is none."""
        hash_N = _hash_values(values)
        # Sorted by hash, so that bisection touches cached entries.
        order = np.argsort(hash_N)
        place_N, found_N = np.empty_like(order), np.full(len(order), -1, np.int64)
        place_N[order] = np.searchsorted(self.hash_U, hash_N[order])
        open_N = np.arange(len(order))
        while len(open_N):  # more than once only where two values have one hash
            open_N = open_N[place_N[open_N] < len(self.hash_U)]
            open_N = open_N[self.hash_U[place_N[open_N]] == hash_N[open_N]]
            stored = self.values.take(pa.array(place_N[open_N]))
            equal = pc.equal(stored, values.take(pa.array(open_N))).to_numpy(zero_copy_only=False)
            found_N[open_N[equal]] = place_N[open_N[equal]]
            open_N = open_N[~equal]
            place_N[open_N] += 1
        return found_N

    def vocabulary(self) -> pa.Array:
        """Return the values in the order of their rows, from row 1 on; null for free rows."""
        stored = np.flatnonzero(self.row_U > 0)
        place_R = np.full(self.num_rows, -1, np.int64)
        place_R[self.row_U[stored] - 1] = stored
        return self.values.take(pa.array(place_R, mask=place_R < 0))

    @property
    def num_pending(self) -> int:
        """Return how many values wait for admission."""
        return int((self.row_U == 0).sum())


class Admission(NamedTuple):
    """What decides which values get a row in a window that begins at `start`, in ticks."""

    least: int  # occurrences that admit a value
    start: int
    ttl: int = 0  # 0: nothing is forgotten
    grace: int = 0
    max_new: int = 0  # 0: any number


@dataclass(frozen=True)
class TableChange:
    """What an increment changed in a table."""

    num_new: int  # values that got a row
    num_freed: int  # values that lost theirs
    num_waiting: int  # values that max_new made wait
    reused: Int64  # rows that had a value once and got another one, ascending
    freed: Int64  # rows that lost their value, reused or not, ascending


def advance(
    old: Numbering, occurrences: Occurrences, rule: Admission
) -> tuple[Numbering, TableChange]:
    """Return the state after a window, given what occurs in it, and what changed."""
    kept = _forget_idle(old, rule)
    place_V = kept.find(occurrences.values)
    is_old_V = place_V >= 0
    row_U, count_U, last_U = kept.row_U.copy(), kept.count_U.copy(), kept.last_U.copy()
    own = place_V[is_old_V]
    row_U[own] = np.abs(row_U[own])  # who is back while its row is kept has it again
    last_U[own] = np.maximum(last_U[own], occurrences.last_V[is_old_V])
    freed = _find_freed_rows(old, row_U) if rule.ttl else np.zeros(0, np.int64)
    before_V, row_V = np.zeros((2, len(place_V)), np.int64)
    before_V[is_old_V], row_V[is_old_V] = count_U[own], row_U[own]
    # A value that waits only for lack of rows has all occurrences: its next one admits it.
    need_V = np.maximum(rule.least - before_V, 1)
    admitted = np.flatnonzero((row_V == 0) & (occurrences.lengths_V >= need_V))
    first_times = occurrences.times[offsets(occurrences.lengths_V)[admitted] + need_V[admitted] - 1]
    keys = pa.table({"time": first_times, "value": occurrences.values.take(pa.array(admitted))})
    # By time, then value: row numbers must not depend on the order of files.
    order = pc.sort_indices(keys, [("time", "ascending"), ("value", "ascending")])
    num_waiting = max(len(order) - rule.max_new, 0) if rule.max_new else 0
    admitted = admitted[order.to_numpy()][: len(order) - num_waiting]
    # Free rows are reused before the table grows.
    free = _find_free_rows(row_U, old.num_rows)[: len(admitted)]
    num_rows = old.num_rows + len(admitted) - len(free)
    row_V[admitted] = np.concatenate([free, np.arange(old.num_rows + 1, num_rows + 1)])
    row_U[own] = row_V[is_old_V]
    count_U[own] = np.minimum(before_V[is_old_V] + occurrences.lengths_V[is_old_V], rule.least)
    new = np.flatnonzero(~is_old_V)
    state = _with_entries(
        Numbering(num_rows, kept.hash_U, kept.values, row_U, count_U, last_U),
        occurrences.values.take(pa.array(new)),
        row_V[new],
        np.minimum(occurrences.lengths_V[new], rule.least),
        occurrences.last_V[new],
    )
    return state, TableChange(len(admitted), len(freed), num_waiting, free, freed)


def _forget_idle(old: Numbering, rule: Admission) -> Numbering:
    """Return the state without values not seen for `ttl`; their rows stay reserved for `grace`."""
    if not rule.ttl:
        return old
    idle_U = old.last_U < rule.start - rule.ttl
    gone_U = idle_U & ((old.row_U == 0) | (old.last_U < rule.start - rule.ttl - rule.grace))
    kept = np.flatnonzero(~gone_U)
    # Negative: reserved for a value that is unknown meanwhile.
    row_U = np.where(idle_U, -np.abs(old.row_U), old.row_U)
    hash_U, values = old.hash_U[kept], old.values.take(pa.array(kept))
    return Numbering(old.num_rows, hash_U, values, row_U[kept], old.count_U[kept], old.last_U[kept])


def _find_free_rows(row_U: Int64, num_rows: int) -> Int64:
    """Return the rows without a value, ascending."""
    is_free_R = np.ones(num_rows + 1, np.bool_)
    is_free_R[0] = False
    is_free_R[np.abs(row_U)] = False
    return np.flatnonzero(is_free_R)


def _find_freed_rows(old: Numbering, row_U: Int64) -> Int64:
    """Return the rows that held a value before and hold none now, ascending."""
    is_freed_R = np.zeros(old.num_rows + 1, np.bool_)
    is_freed_R[old.row_U[old.row_U > 0]] = True
    is_freed_R[row_U[row_U > 0]] = False
    return np.flatnonzero(is_freed_R)


def _with_entries(
    state: Numbering, values: pa.Array, row_V: Int64, count_V: Int64, last_V: Int64
) -> Numbering:
    """Return the state with more entries, merged by hash."""
    hash_V = _hash_values(values)
    order = np.argsort(hash_V, kind="stable")
    at = np.searchsorted(state.hash_U, hash_V[order], side="right")
    both = pa.concat_arrays([state.values, values])
    place = np.insert(np.arange(len(state.hash_U)), at, len(state.hash_U) + order)
    return Numbering(
        state.num_rows,
        np.insert(state.hash_U, at, hash_V[order]),
        both.take(pa.array(place)),
        np.insert(state.row_U, at, row_V[order]),
        np.insert(state.count_U, at, count_V[order]),
        np.insert(state.last_U, at, last_V[order]),
    )


def _hash_values(values: pa.Array) -> UInt64:
    return splitmix64(hash_values(values, infer_kind("", values.type, "stream")))


def choose_capacity(num_rows: int, block: int) -> int:
    """Return the capacity of a table of `num_rows`: the least of 1, 1.5, 2.25 ... blocks, each
    rounded up to whole blocks, that holds them.

    >>> [choose_capacity(rows, 64) for rows in (1, 64, 65, 129, 193)]
    [64, 64, 128, 192, 320]"""
    # Of the number of rows alone, so that all increments of one size agree.
    capacity = block
    while capacity < num_rows:
        capacity = -(-capacity * 3 // (2 * block)) * block
    return capacity
