"""A group of tables that the device does not hold: a cache on it has the rows in use, and others
that are used much.

Shape suffixes: N rows, U unique ids, R rows of tables, D embedding width"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.distributed.tables.row_slots import RowSlots, SlotChange
from gmeta.distributed.tables.rows_to_send import Ints, RowsToSend
from gmeta.distributed.tables.updates import FastGroup, RowStore, row_store
from gmeta.errors import ConfigError

# A smaller table is in the cache as a whole, and a few steps' rows are in any.
MIN_SLOTS = 65_536
# Rows that move at a time: the memory for copies is theirs.
ROWS_AT_ONCE = 8_192


class _Hold:
    """Keeps a step's rows in the cache as long as it is there."""

    def __init__(self, held_U: Ints, release: Callable[[Ints], None]) -> None:
        self.held_U = held_U
        self.ready: Any = None  # an event on a GPU, of the rows' arrival
        # Not by a call behind the update: a step may be dropped without one.
        weakref.finalize(self, release, held_U).atexit = False


@dataclass(frozen=True)
class PlacedRows:
    """A step's rows, by their slots, and what is to move before they are used."""

    group: "CachedGroup"
    rows: RowsToSend
    change: SlotChange


@final
class CachedGroup(FastGroup):
    """A FastGroup whose rows are slots of a cache, where `place` gives a step's rows theirs. Losses
    are those of tables on the device, to the last bit: a row has one place where it is updated."""

    def __init__(self, tables: PlainTables) -> None:
        num_rows = len(tables.values_RD)
        share = tables.storage.cache_share if tables.storage else 1.0
        self.num_slots = min(num_rows, max(int(share * num_rows), MIN_SLOTS))
        super().__init__(tables)
        self.slots = RowSlots(num_rows, self.num_slots)
        cached = {"": self.rows, **self.state}
        # Rows and states: those in the cache, and all.
        self.parts: list[tuple[RowStore, RowStore]] = [
            (cached[name], row_store(stored.scattered_RD)) for name, stored in tables.stored.items()
        ]

    def _values_and_state(self, tables: PlainTables) -> tuple[Tensor, dict[str, Tensor]]:
        def slots_of(values_RD: Tensor) -> Tensor:
            shape = self.num_slots, values_RD.shape[1]
            return torch.empty(*shape, dtype=values_RD.dtype, device=tables.device)

        state = {name: slots_of(values) for name, values in tables.state.items()}
        return slots_of(tables.values_RD), state

    def place(
        self, rows: RowsToSend, release: Callable[[RowSlots, Ints], None]
    ) -> PlacedRows | None:
        """Return rows as `look_up` and `update` take them, in slots until these are gone, which
        `release` hears. None: too many slots are held by others."""
        slots = self.slots
        if (change := slots.admit(rows.row_N.numpy())) is None:
            return None
        found = self.repeats.prepare_rows(change.slot_N)
        hold = _Hold(change.held_U, lambda held_U: release(slots, held_U))
        placed = RowsToSend(found.row_N, found.merge, hold, rows.row_N)
        return PlacedRows(self, placed, change)

    def too_small(self, rows: RowsToSend) -> ConfigError:
        """Return the error for a step that finds no room."""
        return ConfigError(
            f"a step needs {np.unique(rows.row_N.numpy()).size:,} rows of tables whose cache has "
            f"{self.num_slots:,} slots, too few for it and the steps ahead. Raise "
            "sharding.cache_share, or lower data.tasks_per_step"
        )

    def update(self, to_update: RowsToSend, grad_ND: Tensor) -> None:
        """Take one optimizer step on these rows, see FastGroup."""
        super().update(to_update, grad_ND)
        self.slots.mark_changed(to_update.hold.held_U)

    def read(self, row_U: Ints) -> list[Tensor]:
        """Return rows of the tables, and each of their states, on the host."""
        found = [kept.values_RD.new_empty(row_U.size, kept.width) for _, kept in self.parts]
        for chunk in chunks(row_U.size):
            for stored in self.tables.stored.values():
                stored.prefetch(row_U[chunk])
            rows = torch.from_numpy(row_U[chunk])
            for (_, kept), values_UD in zip(self.parts, found, strict=True):
                kept.copy(rows, values_UD[chunk])
        return found

    def write(self, row_U: Ints, values: Sequence[Tensor]) -> None:
        """Replace rows of the tables, and their states, by these on the host."""
        for stored in self.tables.stored.values():
            stored.prefetch(row_U)
        for (_, kept), values_UD in zip(self.parts, values, strict=True):
            kept.write(torch.from_numpy(row_U), values_UD)

    def copy_slots(self, slot_U: Tensor) -> list[Tensor]:
        """Return copies of rows in the cache, and of their states."""
        return [cached.copy_rows(slot_U) for cached, _ in self.parts]

    def fill_slots(self, slot_U: Tensor, values: Sequence[Tensor]) -> None:
        """Replace rows in the cache, and their states."""
        for (cached, _), values_UD in zip(self.parts, values, strict=True):
            cached.write(slot_U, values_UD)


def chunks(number: int) -> Iterator[slice]:
    """Yield slices of at most ROWS_AT_ONCE of so many rows."""
    return (slice(first, first + ROWS_AT_ONCE) for first in range(0, number, ROWS_AT_ONCE))
