"""Rows of values, against a dict that is told one occurrence after the other."""

import itertools
import string
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaio.stream.numbering import (
    Admission,
    Numbering,
    Occurrences,
    TableChange,
    advance,
    choose_capacity,
    merge_occurrences,
)

Event = tuple[int, str]  # time, value
EVENTS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(string.ascii_letters[:12])))


@dataclass
class Slow:
    """One table: rows by value, and what is known of each value."""

    least: int
    ttl: int = 0
    grace: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    last: dict[str, int] = field(default_factory=dict)
    highest: int = 0
    reused: list[int] = field(default_factory=list)  # by the last window
    lost: set[int] = field(default_factory=set)

    def forget(self, start: int) -> None:
        """What is too old at the beginning of a window."""
        self.lost = set()
        if not self.ttl:
            return
        for value in [v for v, t in self.last.items() if t < start - self.ttl]:
            if value in self.rows:
                self.reserved[value] = self.rows.pop(value)
                self.lost.add(self.reserved[value])
            elif value not in self.reserved:
                del self.last[value], self.counts[value]
        for value in list(self.reserved):
            if self.last[value] < start - self.ttl - self.grace:
                del self.reserved[value], self.last[value], self.counts[value]

    def see(self, events: list[Event]) -> None:
        """One window, one occurrence after the other."""
        admitted: list[Event] = []
        self.reused = []
        for time, value in sorted(events):
            self.last[value] = max(self.last.get(value, 0), time)
            if value in self.reserved:
                self.rows[value] = self.reserved.pop(value)
                self.lost.discard(self.rows[value])
            self.counts[value] += 1
            if value not in self.rows and self.counts[value] == self.least:
                admitted.append((time, value))
        for _, value in admitted:
            taken = {*self.rows.values(), *self.reserved.values()}
            free = [row for row in range(1, self.highest + 1) if row not in taken]
            self.rows[value] = free[0] if free else self.highest + 1
            self.reused += free[:1]
            self.highest = max(self.highest, self.rows[value])


def window(state: Numbering, events: list[Event], rule: Admission) -> tuple[Numbering, TableChange]:
    """The state after a window, whose events come in batches of three."""
    parts = [
        Occurrences.of(
            pa.array([value for _, value in batch], state.values.type),
            np.array([time for time, _ in batch], np.int64),
            rule.least,
        )
        for batch in ([events[i : i + 3] for i in range(0, len(events), 3)] or [[]])
    ]
    return advance(state, merge_occurrences(parts, rule.least), rule)


def empty() -> Numbering:
    return Numbering.empty(pa.large_string())


def rows_of(state: Numbering) -> dict[str, int]:
    """The row of each value that has one, by the vocabulary."""
    words = state.vocabulary().to_pylist()
    return {value: row for row, value in enumerate(words, start=1) if value is not None}


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sets(st.integers(1, 30)), st.integers(1, 3))
def test_the_same_ids_get_the_same_rows_wherever_the_log_is_cut(
    events: list[Event], cuts: set[int], least: int
) -> None:
    expected = Slow(least)
    expected.see(events)
    state, bounds = empty(), [0, *sorted(cuts), 31]
    for start, stop in itertools.pairwise(bounds):
        part = [event for event in events if start <= event[0] < stop]
        state, _ = window(state, part, Admission(least, start))
    assert rows_of(state) == expected.rows
    letters = list(string.ascii_letters[:12])
    found = state.rows(pa.array(letters)).tolist()
    assert found == [expected.rows.get(letter, 0) for letter in letters]


@settings(max_examples=80, deadline=None)
@given(EVENTS, st.sets(st.integers(1, 30)), st.integers(1, 3), st.integers(1, 8), st.integers(0, 6))
def test_what_is_forgotten_frees_its_row_after_the_grace(
    events: list[Event], cuts: set[int], least: int, ttl: int, grace: int
) -> None:
    slow, state, bounds = Slow(least, ttl, grace), empty(), [0, *sorted(cuts), 31]
    for start, stop in itertools.pairwise(bounds):
        part = [event for event in events if start <= event[0] < stop]
        slow.forget(start)
        slow.see(part)
        state, change = window(state, part, Admission(least, start, ttl, grace))
        assert rows_of(state) == slow.rows
        assert change.freed.tolist() == sorted(slow.lost)
        assert change.reused.tolist() == slow.reused


def test_ids_above_the_limit_of_a_window_wait_and_come_first_in_the_next() -> None:
    rule = Admission(2, 0, max_new=1)
    state, change = window(empty(), [(1, "b"), (1, "b"), (2, "a"), (2, "a"), (3, "c")], rule)
    assert rows_of(state) == {"b": 1}
    assert (change.num_new, change.num_waiting, state.num_pending) == (1, 1, 2)
    state, change = window(state, [(5, "c"), (4, "a")], rule._replace(max_new=0))
    assert rows_of(state) == {"b": 1, "a": 2, "c": 3}
    assert (change.num_new, change.num_waiting, state.num_pending) == (2, 0, 0)


def test_values_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "metaio.stream.numbering._hash_values", lambda values: np.full(len(values), 7, np.uint64)
    )
    state, _ = window(empty(), [(2, "a"), (1, "b"), (3, "c")], Admission(1, 0))
    state, _ = window(state, [(4, "d"), (4, "a")], Admission(1, 4))
    assert rows_of(state) == {"b": 1, "a": 2, "c": 3, "d": 4}
    assert state.rows(pa.array(["d", "x", "a", "c", "b"])).tolist() == [4, 0, 2, 3, 1]


def test_integers_are_numbered_as_text_is() -> None:
    state = Numbering.empty(pa.int64())
    seen = Occurrences.of(pa.array([9, -1, 9, 4]), np.array([5, 2, 1, 2]), 1)
    state, _ = advance(state, seen, Admission(1, 0))
    assert state.vocabulary().to_pylist() == [9, -1, 4]
    assert state.rows(pa.array([4, 5, 9])).tolist() == [3, 0, 1]


def test_capacity_depends_on_the_rows_alone_and_grows_by_half() -> None:
    found = [choose_capacity(rows, 10) for rows in range(1, 200)]
    assert sorted(found) == found
    assert all(rows <= capacity for rows, capacity in enumerate(found, start=1))
    assert sorted(set(found))[:5] == [10, 20, 30, 50, 80]
