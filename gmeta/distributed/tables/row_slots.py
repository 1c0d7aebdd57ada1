"""Which rows of a group have a place in its cache.

A row that a step needs gets a place before the step, if it has none; a place is given to another
row only while no step under way needs it. Rows that are counted more often stay (TinyLFU: arXiv
1512.00727).

Shape suffixes: N rows, U unique ids, R rows of tables"""

from collections import deque
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from gmeta.distributed.tables.rows_to_send import Ints

MOST_COUNTED = 255
# Counts are halved after this many for each slot: what was popular long ago makes room.
COUNTS_PER_SLOT = 8
# Slots that are compared with those filled last, beside as many as are needed.
SAMPLE = 64


class SlotChange(NamedTuple):
    """The slots of the rows that were asked for, and what is to move before they are used: first
    `written` out of slots that others get, then `read` into theirs; each ascending by row."""

    slot_N: Ints
    held_U: Ints  # the same slots, each once: others' until `RowSlots.release`
    written_row: Ints
    written_slot: Ints
    read_row: Ints
    read_slot: Ints


@final
class RowSlots:
    """The slots of a cache. One thread at a time may call it; `release` and `mark_changed` any."""

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_asked = self.num_found = 0  # distinct rows of all steps, and those that had a slot
        self._slot_R = np.full(num_rows, -1, np.int32)
        self._count_R = np.zeros(num_rows, np.uint8)
        self._row_of_slot = np.full(num_slots, -1, np.int64)
        self._num_holders = np.zeros(num_slots, np.int16)
        self._is_changed = np.zeros(num_slots, bool)
        self._num_filled = 0
        self._hand = 0
        self._num_counted = 0
        self._new = np.zeros(0, np.int64)  # slots that were filled and not compared yet
        self._released: deque[Ints] = deque()

    def release(self, held_U: Ints) -> None:
        """Give slots free that a step under way held."""
        self._released.append(held_U)

    def mark_changed(self, held_U: Ints) -> None:
        """Note that rows in these slots are newer than where they came from."""
        self._is_changed[held_U] = True

    def take_changed(self) -> tuple[Ints, Ints]:
        """Return the changed rows, ascending, and their slots; they count as unchanged then."""
        slots = np.flatnonzero(self._is_changed)
        self._is_changed[slots] = False
        return _by_row(self._row_of_slot[slots], slots)

    def admit(self, row_N: Ints) -> SlotChange | None:
        """Return these rows' slots, held from now on. None: too many slots are held by others, and
        nothing has changed."""
        while self._released:
            self._num_holders[self._released.popleft()] -= 1
        slot_N = self._slot_R.take(row_N)
        found_U = np.unique(slot_N[slot_N >= 0]).astype(np.int64)
        read_row = np.unique(row_N[slot_N < 0])
        self._num_holders[found_U] += 1
        read_slot = self._make_room(read_row.size)
        if read_slot is None:
            self._num_holders[found_U] -= 1
            return None
        is_written = self._is_changed[read_slot]
        written_slot = read_slot[is_written]
        written_row, written_slot = _by_row(self._row_of_slot[written_slot], written_slot)
        gone = self._row_of_slot[read_slot]
        self._slot_R[gone[gone >= 0]] = -1
        self._row_of_slot[read_slot] = read_row
        self._slot_R[read_row] = read_slot
        self._is_changed[read_slot] = False
        self._num_holders[read_slot] += 1
        self._new = np.concatenate([self._new, read_slot])
        held_U = np.concatenate([found_U, read_slot])
        self._count(held_U, found_U.size)
        slots_N = self._slot_R.take(row_N).astype(np.int64)
        return SlotChange(slots_N, held_U, written_row, written_slot, read_row, read_slot)

    def _count(self, held_U: Ints, num_found: int) -> None:
        self.num_asked += held_U.size
        self.num_found += num_found
        row_U = self._row_of_slot.take(held_U)
        count_U = self._count_R.take(row_U)
        self._count_R[row_U] = count_U + (count_U < MOST_COUNTED)
        self._num_counted += held_U.size
        if self._num_counted > COUNTS_PER_SLOT * self.num_slots:
            self._num_counted //= 2
            self._count_R >>= 1

    def _make_room(self, number: int) -> Ints | None:
        """Return so many slots that nobody holds; None: there are fewer."""
        first = self._num_filled
        unfilled = np.arange(first, min(first + number, self.num_slots))
        victims = self._choose_victims(number - unfilled.size)
        if victims is None:
            return None
        self._num_filled += unfilled.size
        return np.concatenate([unfilled, victims])

    def _choose_victims(self, number: int) -> Ints | None:
        if not number:
            return np.zeros(0, np.int64)
        is_held = self._num_holders[self._new] > 0
        new, still_new = self._new[~is_held], self._new[is_held]
        # A row that came last stays only if it was counted more often than others that have long
        # been there: of all slots the next ones in turn.
        sample = (self._hand + np.arange(2 * number + SAMPLE)) % self.num_slots
        is_free = (self._num_holders[sample] == 0) & (self._row_of_slot[sample] >= 0)
        candidates = np.union1d(new, sample[is_free])
        if candidates.size < number:
            candidates = np.flatnonzero(self._num_holders[: self._num_filled] == 0)
            if candidates.size < number:
                return None
        self._hand = int(sample[-1] + 1) % self.num_slots
        self._new = still_new
        # Of equals those that came last: where they lie was read a moment ago.
        age_of: npt.NDArray[np.int16] = 2 * self._count_R[self._row_of_slot[candidates]].astype(
            np.int16
        )
        age_of += ~np.isin(candidates, new)
        return candidates[np.argpartition(age_of, number - 1)[:number]]


def _by_row(rows: Ints, slots: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(rows)
    return rows[order], slots[order]
