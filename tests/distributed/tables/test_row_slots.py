"""Slots of a cache against a slow model of it: contents are those of the rows, whatever moves."""

import numpy as np
import pytest

from gmeta.distributed.tables.row_slots import RowSlots, SlotChange

NUM_ROWS = 200


class Contents:
    """A table and its cache, moved as RowSlots says."""

    def __init__(self, num_slots: int) -> None:
        self.slots = RowSlots(NUM_ROWS, num_slots)
        self.kept = np.zeros(NUM_ROWS, np.int64)
        self.cached = np.full(num_slots, -1)

    def admit(self, row_N: list[int]) -> SlotChange:
        change = self.slots.admit(np.array(row_N, np.int64))
        assert change is not None
        for rows in (change.written_row, change.read_row):
            assert (np.diff(rows) > 0).all()
        self.kept[change.written_row] = self.cached[change.written_slot]
        self.cached[change.read_slot] = self.kept[change.read_row]
        return change


@pytest.mark.parametrize("num_slots", [60, 73, NUM_ROWS])
def test_every_step_finds_its_rows_as_the_steps_before_left_them(num_slots: int) -> None:
    rng = np.random.default_rng(num_slots)
    now, updates = Contents(num_slots), np.zeros(NUM_ROWS, np.int64)
    # Three steps are under way: each is planned before the two before it are taken.
    planned: list[tuple[np.ndarray, SlotChange]] = []
    for step in range(300):
        popular = (NUM_ROWS * rng.random(rng.integers(1, 20)) ** 3).astype(np.int64)
        planned.append((popular, now.admit(popular.tolist())))
        if len(planned) < 3:
            continue
        row_N, change = planned.pop(0)
        assert (now.cached[change.slot_N] == updates[row_N]).all()
        if step % 7:  # a step that only predicts changes nothing
            now.cached[change.held_U] += 1
            now.slots.mark_changed(change.held_U)
            updates[np.unique(row_N)] += 1
        now.slots.release(change.held_U)
        if step % 50 == 0:
            rows, slots = now.slots.take_changed()
            now.kept[rows] = now.cached[slots]
            assert (now.kept == updates).all()
    assert 0 < now.slots.num_found < now.slots.num_asked


def test_rows_of_steps_under_way_keep_their_slots_and_no_room_changes_nothing() -> None:
    now = Contents(4)
    first = now.admit([0, 1, 2])
    assert now.slots.admit(np.array([1, 5, 6])) is None
    second = now.admit([2, 5])
    assert second.read_row.tolist() == [5]
    assert now.slots.admit(np.array([6])) is None
    now.slots.release(first.held_U)
    third = now.admit([6, 7])  # 2 is held by the second step
    assert set(third.read_slot) == {first.slot_N[0], first.slot_N[1]}
    assert set(third.slot_N).isdisjoint(second.slot_N)
    assert third.written_row.size == 0  # nobody changed them


def test_rows_that_are_asked_for_often_stay() -> None:
    now = Contents(80)
    for step in range(100):
        rare = 50 + (7 * step + np.arange(10)) % 150
        change = now.admit([*range(50), *rare.tolist()])
        now.slots.release(change.held_U)
        if step:
            assert set(change.read_row.tolist()) <= set(rare.tolist())
