"""Rows of values, in the order in which they were admitted: appended or reused, never moved.

A value gets its row by (time of its k-th occurrence in training rows, value), so that it does not
matter where the log was cut into increments. What was seen less than k times is counted on.

Shape suffixes: V values of a batch, D distinct values of a window, E entries of a table's state,
A values admitted now, R rows of a table.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.hashing import UInt64, splitmix64
from metaio.prepare.values import hash_values, kind_of
from metaio.ragged import Int64, entries_of, offsets, places


@dataclass(frozen=True)
class Occurrences:
    """The distinct values of some rows: of each, its first times, ascending, at most as many as it
    takes to admit it, and its last time."""

    values: pa.Array  # [D], of one type, no nulls
    lengths_D: Int64  # how many times of each value
    times: Int64  # value by value
    last_D: Int64

    @classmethod
    def of(cls, values: pa.Array, times_V: Int64, admission: int) -> "Occurrences":
        """Return the occurrences of a batch's values, each with its time."""
        return _reduced(values, np.ones(len(times_V), np.int64), times_V, times_V, admission)

    def dealt(self, num_parts: int) -> list[tuple[int, "Occurrences"]]:
        """Return the values of each of `num_parts` parts that has any; a value is always in the
        same part, whatever other values are there."""
        part_D = (_hashes(self.values) % np.uint64(num_parts)).astype(np.int64)
        offsets_D1 = offsets(self.lengths_D)
        found = []
        for part in np.unique(part_D).tolist():
            own = np.flatnonzero(part_D == part)
            times = self.times[entries_of(offsets_D1, own)]
            values = self.values.take(pa.array(own))
            found.append((part, Occurrences(values, self.lengths_D[own], times, self.last_D[own])))
        return found


def merged(parts: list[Occurrences], admission: int) -> Occurrences:
    """Return the occurrences of all parts together; there is at least one."""
    return _reduced(
        pa.concat_arrays([part.values for part in parts]),
        np.concatenate([part.lengths_D for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.last_D for part in parts]),
        admission,
    )


def _reduced(
    values: pa.Array, lengths_V: Int64, times: Int64, last_V: Int64, admission: int
) -> Occurrences:
    encoded = pc.dictionary_encode(values)
    code_V = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    distinct = len(encoded.dictionary)
    code = np.repeat(code_V, lengths_V)
    order = np.lexsort((times, code))
    counts_D = np.bincount(code, minlength=distinct)
    # The place of each time among those of its value: those behind the one that admits it say
    # nothing.
    rank = places(counts_D)
    by_code = np.argsort(code_V, kind="stable")
    starts_D = offsets(np.bincount(code_V, minlength=distinct))[:-1]
    last_D = np.maximum.reduceat(last_V[by_code], starts_D) if distinct else last_V
    kept = order[rank < admission]
    return Occurrences(encoded.dictionary, np.minimum(counts_D, admission), times[kept], last_D)


@dataclass(frozen=True)
class Numbering:
    """The state of one table, sorted by the hash of the values, so that finding many of them is one
    bisection. It is the `RowIndex` of its values.

    `row_E` is the row of a value; 0 while it waits for admission; negative for a row that is kept
    for a value which was not seen for `ttl`. `num_rows` is the highest row ever given out.
    """

    num_rows: int
    hash_E: UInt64
    values: pa.Array
    row_E: Int64
    count_E: Int64  # occurrences, as long as it waits
    last_E: Int64  # time of the last occurrence

    @classmethod
    def empty(cls, value_type: pa.DataType) -> "Numbering":
        """Return the state of a table without values."""
        none = np.zeros(0, np.int64)
        return cls(0, none.view(np.uint64), pa.array([], value_type), none, none, none)

    def rows(self, column: pa.Array) -> Int64:
        """Return the row of each value [N], 0 for what has none; no nulls."""
        if not len(self.row_E):
            return np.zeros(len(column), np.int64)
        place_N = self.find(self._as_held(column))
        return np.where(place_N >= 0, np.maximum(self.row_E[place_N], 0), 0)

    def _as_held(self, column: pa.Array) -> pa.Array:
        """Return values of a batch in the type of the table's."""
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column if column.type.equals(self.values.type) else column.cast(self.values.type)

    def find(self, values: pa.Array) -> Int64:
        """Return the entry of each value, -1 where there is none."""
        hash_N = _hashes(values)
        # In the order of the hashes: what bisection touches is then in the cache.
        order = np.argsort(hash_N)
        place_N, found_N = np.empty_like(order), np.full(len(order), -1, np.int64)
        place_N[order] = np.searchsorted(self.hash_E, hash_N[order])
        open_N = np.arange(len(order))
        while len(open_N):  # more than once only where two values have one hash
            open_N = open_N[place_N[open_N] < len(self.hash_E)]
            open_N = open_N[self.hash_E[place_N[open_N]] == hash_N[open_N]]
            held = self.values.take(pa.array(place_N[open_N]))
            equal = pc.equal(held, values.take(pa.array(open_N))).to_numpy(zero_copy_only=False)
            found_N[open_N[equal]] = place_N[open_N[equal]]
            open_N = open_N[~equal]
            place_N[open_N] += 1
        return found_N

    def vocabulary(self) -> pa.Array:
        """Return the values in the order of their rows, from row 1 on: null where none has it."""
        held = np.flatnonzero(self.row_E > 0)
        place_R = np.full(self.num_rows, -1, np.int64)
        place_R[self.row_E[held] - 1] = held
        return self.values.take(pa.array(place_R, mask=place_R < 0))

    @property
    def num_pending(self) -> int:
        """Return how many values wait for admission."""
        return int((self.row_E == 0).sum())


class Admission(NamedTuple):
    """What decides who gets a row in a window that begins at `start`: times on the log's scale."""

    least: int  # occurrences that admit a value
    start: int
    ttl: int = 0  # 0: nothing is forgotten
    grace: int = 0
    max_new: int = 0  # 0: any number


@dataclass(frozen=True)
class Change:
    """What an increment changed in a table."""

    num_new: int  # values that got a row
    num_freed: int  # values that lost theirs
    num_waiting: int  # values that max_new made wait
    reused: Int64  # rows that had a value once and got another one, ascending
    freed: Int64  # rows that lost their value, reused or not, ascending


def advanced(old: Numbering, seen: Occurrences, rule: Admission) -> tuple[Numbering, Change]:
    """Return the state after a window, given what occurs in it, and what changed."""
    kept = _forgotten(old, rule)
    place_D = kept.find(seen.values)
    is_old_D = place_D >= 0
    row_E, count_E, last_E = kept.row_E.copy(), kept.count_E.copy(), kept.last_E.copy()
    own = place_D[is_old_D]
    row_E[own] = np.abs(row_E[own])  # who is back while its row is kept has it again
    last_E[own] = np.maximum(last_E[own], seen.last_D[is_old_D])
    freed = _freed_rows(old, row_E) if rule.ttl else np.zeros(0, np.int64)
    before_D, row_D = np.zeros((2, len(place_D)), np.int64)
    before_D[is_old_D], row_D[is_old_D] = count_E[own], row_E[own]
    # Who has all occurrences, and waited for lack of rows, is admitted at the first one.
    need_D = np.maximum(rule.least - before_D, 1)
    admitted = np.flatnonzero((row_D == 0) & (seen.lengths_D >= need_D))
    times_A = seen.times[offsets(seen.lengths_D)[admitted] + need_D[admitted] - 1]
    keys = pa.table({"time": times_A, "value": seen.values.take(pa.array(admitted))})
    order = pc.sort_indices(keys, [("time", "ascending"), ("value", "ascending")])
    num_waiting = max(len(order) - rule.max_new, 0) if rule.max_new else 0
    admitted = admitted[order.to_numpy()][: len(order) - num_waiting]
    free = _free_rows(row_E, old.num_rows)[: len(admitted)]
    num_rows = old.num_rows + len(admitted) - len(free)
    row_D[admitted] = np.concatenate([free, np.arange(old.num_rows + 1, num_rows + 1)])
    row_E[own] = row_D[is_old_D]
    count_E[own] = np.minimum(before_D[is_old_D] + seen.lengths_D[is_old_D], rule.least)
    new = np.flatnonzero(~is_old_D)
    state = _with_entries(
        Numbering(num_rows, kept.hash_E, kept.values, row_E, count_E, last_E),
        seen.values.take(pa.array(new)),
        row_D[new],
        np.minimum(seen.lengths_D[new], rule.least),
        seen.last_D[new],
    )
    return state, Change(len(admitted), len(freed), num_waiting, free, freed)


def _forgotten(old: Numbering, rule: Admission) -> Numbering:
    """Return the state without what was not seen for `ttl`: rows stay reserved for `grace`."""
    if not rule.ttl:
        return old
    idle_E = old.last_E < rule.start - rule.ttl
    gone_E = idle_E & ((old.row_E == 0) | (old.last_E < rule.start - rule.ttl - rule.grace))
    kept = np.flatnonzero(~gone_E)
    row_E = np.where(idle_E, -np.abs(old.row_E), old.row_E)
    return Numbering(
        old.num_rows,
        old.hash_E[kept],
        old.values.take(pa.array(kept)),
        row_E[kept],
        old.count_E[kept],
        old.last_E[kept],
    )


def _free_rows(row_E: Int64, num_rows: int) -> Int64:
    """Return the rows that belong to nobody, ascending."""
    is_free_R = np.ones(num_rows + 1, np.bool_)
    is_free_R[0] = False
    is_free_R[np.abs(row_E)] = False
    return np.flatnonzero(is_free_R)


def _freed_rows(old: Numbering, row_E: Int64) -> Int64:
    """Return the rows that held a value before and hold none now, ascending."""
    is_freed_R = np.zeros(old.num_rows + 1, np.bool_)
    is_freed_R[old.row_E[old.row_E > 0]] = True
    is_freed_R[row_E[row_E > 0]] = False
    return np.flatnonzero(is_freed_R)


def _with_entries(
    state: Numbering, values: pa.Array, row_A: Int64, count_A: Int64, last_A: Int64
) -> Numbering:
    """Return the state with more entries, merged by hash."""
    hash_A = _hashes(values)
    order = np.argsort(hash_A, kind="stable")
    at = np.searchsorted(state.hash_E, hash_A[order], side="right")
    both = pa.concat_arrays([state.values, values])
    place = np.insert(np.arange(len(state.hash_E)), at, len(state.hash_E) + order)
    return Numbering(
        state.num_rows,
        np.insert(state.hash_E, at, hash_A[order]),
        both.take(pa.array(place)),
        np.insert(state.row_E, at, row_A[order]),
        np.insert(state.count_E, at, count_A[order]),
        np.insert(state.last_E, at, last_A[order]),
    )


def _hashes(values: pa.Array) -> UInt64:
    return splitmix64(hash_values(values, kind_of("", values.type, "stream")))


def capacity_of(num_rows: int, block: int) -> int:
    """Return the rows that a table of `num_rows` is given: the least of 1, 1.5, 2.25 ... blocks,
    each rounded up to whole blocks, that holds them. It depends on nothing else, so that all
    increments of one size agree.

    >>> [capacity_of(rows, 64) for rows in (1, 64, 65, 129, 193)]
    [64, 64, 128, 192, 320]
    """
    capacity = block
    while capacity < num_rows:
        capacity = -(-capacity * 3 // (2 * block)) * block
    return capacity
