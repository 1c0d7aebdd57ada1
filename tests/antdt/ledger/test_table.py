"""The table of shard states against a plain dict of them, over random walks and stored pages."""

import random
from itertools import groupby

import pytest

from gmeta.antdt.ledger import table as table_module
from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.model import DatasetSpec, ShardState


def spec_of(num_shards: int, max_attempts: int = 3) -> DatasetSpec:
    return DatasetSpec("train", 3 * num_shards - 1, 3, seed=7, max_attempts=max_attempts)


def walk(rng: random.Random, table: ShardTable, num_moves: int) -> dict[int, ShardState]:
    """Moves shards at random, and the same shards of a plain dict."""
    states = dict.fromkeys(range(table.spec.num_shards), ShardState.READY)
    for _ in range(num_moves):
        position, state = rng.randrange(table.spec.num_shards), rng.choice(list(ShardState))
        table.set_state(position, state)
        states[position] = state
    return states


@pytest.mark.parametrize("seed", range(8))
def test_counts_intervals_and_offers_follow_the_states(seed: int) -> None:
    rng = random.Random(seed)
    table = ShardTable(spec_of(rng.randint(1, 60)))
    for num_moves in (0, 1, 40, 200):
        walk(rng, table, num_moves)
        states = {p: table.state_of(p) for p in range(table.spec.num_shards)}
        assert table.counts == [list(states.values()).count(state) for state in ShardState]
        ready = [p for p, state in states.items() if state == ShardState.READY]
        for max_shards in (0, 1, 7, 1000):
            assert table.next_ready(max_shards) == ready[:max_shards]
        done = (p for p, state in states.items() if state == ShardState.DONE)
        runs = [[p for _, p in run] for _, run in groupby(enumerate(done), lambda x: x[1] - x[0])]
        assert table.done_intervals() == [(run[0], run[-1] + 1) for run in runs]
        for state in ShardState:
            start = rng.randrange(table.spec.num_shards + 1)
            wanted = [p for p, one in states.items() if one == state and p >= start]
            assert list(table.positions_in(state, start)) == wanted
        over = all(state in (ShardState.DONE, ShardState.SKIPPED) for state in states.values())
        assert table.finished == over


@pytest.mark.parametrize("seed", range(8))
def test_a_walk_ends_in_the_states_that_it_set(seed: int) -> None:
    rng = random.Random(seed)
    table = ShardTable(spec_of(50))
    states = walk(rng, table, 300)
    assert [table.state_of(p) for p in range(50)] == [states[p] for p in range(50)]


@pytest.mark.parametrize("seed", range(8))
def test_dirty_pages_are_all_that_a_store_needs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(table_module, "SHARDS_PER_PAGE", 8)
    rng = random.Random(seed)
    table, stored = ShardTable(spec_of(50)), dict[int, bytes]()
    for _ in range(4):
        walk(rng, table, rng.randint(0, 12))
        stored |= {number: table.page(number) for number in table.dirty_pages}
        table.dirty_pages.clear()
        again = ShardTable(table.spec)
        again.load_pages(sorted(stored.items()))
        assert again.states == table.states
        assert again.counts == table.counts
        assert again.next_ready(50) == table.next_ready(50)


def test_pages_that_are_all_ready_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "SHARDS_PER_PAGE", 8)
    table = ShardTable(spec_of(50))
    table.set_state(20, ShardState.DOING)
    table.set_state(49, ShardState.DONE)
    table.set_state(3, ShardState.DOING)
    table.set_state(3, ShardState.READY)
    table.mark_all_dirty()
    assert table.dirty_pages == {2, 6}


def test_a_shard_that_comes_back_is_offered_first_again() -> None:
    table = ShardTable(spec_of(10))
    for position in table.next_ready(4):
        table.set_state(position, ShardState.DOING)
    table.give_back(1, counts_attempt=False)
    assert table.next_ready(3) == [1, 4, 5]


def test_a_shard_that_failed_too_often_is_quarantined_with_its_note_and_offset() -> None:
    table = ShardTable(spec_of(4, max_attempts=2))
    table.units_done[2] = 1
    for attempt in range(3):
        table.set_state(2, ShardState.DOING)
        table.give_back(2, counts_attempt=True, note=f"failure {attempt}")
    assert table.state_of(2) == ShardState.QUARANTINED
    assert (table.attempts[2], table.notes[2], table.units_done[2]) == (3, "failure 2", 1)
    # What an operator skipped keeps its reason; what is done has none.
    table.set_state(2, ShardState.DONE)
    assert (table.attempts, table.notes, table.units_done) == ({}, {}, {})


def test_a_shard_that_another_worker_still_holds_stays_in_hand() -> None:
    table = ShardTable(spec_of(4, max_attempts=1))
    table.set_state(0, ShardState.DOING)
    for _ in range(3):
        table.give_back(0, counts_attempt=True, still_held=True)
    assert table.state_of(0) == ShardState.DOING
    table.give_back(0, counts_attempt=False)
    assert table.state_of(0) == ShardState.QUARANTINED


def test_a_new_epoch_begins_with_every_shard_and_nothing_remembered() -> None:
    table = ShardTable(spec_of(20))
    walk(random.Random(0), table, 100)
    table.notes[0], table.committed = "a note", [(0, 3)]
    first_order = [table.order.index_of(p) for p in range(20)]
    table.open_epoch(1)
    assert table.counts == [20, 0, 0, 0, 0]
    assert table.next_ready(20) == list(range(20))
    assert (table.notes, table.num_committed, table.cleared) == ({}, 0, True)
    assert [table.order.index_of(p) for p in range(20)] != first_order


def test_a_grant_names_the_units_of_its_shard_and_the_last_shard_is_shorter() -> None:
    table = ShardTable(spec_of(5))
    grants = [table.grant(9, position, 0, 0) for position in range(5)]
    units = sorted((grant.start_unit, grant.num_units) for grant in grants)
    assert units == [(0, 3), (3, 3), (6, 3), (9, 3), (12, 2)]
    assert sum(table.length_at(position) for position in range(5)) == table.spec.num_units
