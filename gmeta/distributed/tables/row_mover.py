"""Moves rows between the caches of groups and the memory that has all of them, steps ahead.

A row moves while no step under way has it: only what was given free goes out, and what comes in was
nowhere else. So rows that the steps before still update are never read too early: they are in the
cache already."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from gmeta.data.transfer import pack
from gmeta.distributed.tables.cached_group import CachedGroup, PlacedRows, chunks
from gmeta.distributed.tables.row_slots import RowSlots
from gmeta.distributed.tables.rows_to_send import Ints, RowsToSend
from gmeta.distributed.tables.updates import FastGroup

POLL_S = 0.05


class _RowsIn(NamedTuple):
    """Rows of a group on their way to the device, with the slots that they get."""

    rows: RowsToSend
    written_slot: Tensor
    read_slot: Tensor
    values: tuple[Tensor, ...]  # of rows and of each state


class _RowsOut(NamedTuple):
    """Rows of groups on their way to the host."""

    placed: list[PlacedRows]
    on_host: Tensor
    sizes: list[int]
    is_there: torch.cuda.Event


class RowMover(ABC):
    """The caches of a rank's groups. One thread calls `admit`, another the rest."""

    def __init__(self, groups: Sequence[CachedGroup]) -> None:
        self._groups = groups
        self._reported = 0, 0
        # A row is on its way only while this is held.
        self._lock = threading.RLock()
        for group in groups:
            group.tables.cache = self

    def admit(
        self,
        groups: Sequence[FastGroup],
        rows_G: Sequence[RowsToSend],
        is_awaited: Callable[[], bool],
    ) -> tuple[RowsToSend, ...]:
        """Return each group's rows as it takes them, in its cache if it has one. Waits for steps
        before to give slots free; raises ConfigError where a cache is too small for a step."""
        found: dict[int, RowsToSend] = {}
        waiting = [at for at, group in enumerate(groups) if isinstance(group, CachedGroup)]
        others = [at for at in range(len(groups)) if at not in waiting]
        while waiting:
            with self._lock:
                placed: list[PlacedRows] = []
                for at in waiting:
                    group = groups[at]
                    assert isinstance(group, CachedGroup)
                    if (one := group.place(rows_G[at], self._release)) is None:
                        break
                    placed.append(one)
                done = [*others, *waiting[: len(placed)]]
                moved = self._move([rows_G[at] for at in others], placed)
            found |= dict(zip(done, moved, strict=True))
            waiting, others = waiting[len(placed) :], []
            # Who waits for these rows would have to give others free.
            if waiting and is_awaited():
                raise groups[waiting[0]].too_small(rows_G[waiting[0]])  # type: ignore[attr-defined]
            if waiting:
                time.sleep(POLL_S)
        return tuple(found[at] for at in range(len(groups)))

    def reading(self) -> dict[str, float]:
        """Return the share of steps' distinct rows since the last call that had a slot already."""
        slots = [group.slots for group in self._groups]
        asked, found = sum(one.num_asked for one in slots), sum(one.num_found for one in slots)
        asked_now, found_now = asked - self._reported[0], found - self._reported[1]
        self._reported = asked, found
        return {"cache_hit_rate": found_now / asked_now} if asked_now > 0 else {}

    def flush(self) -> None:
        """Write the changed rows of all caches to the tables, between steps."""
        with self._lock:
            for group in self._groups:
                row_U, slot_U = group.slots.take_changed()
                for chunk in chunks(row_U.size):
                    slots = torch.from_numpy(slot_U[chunk]).to(group.tables.device)
                    group.write(row_U[chunk], [one.cpu() for one in group.copy_slots(slots)])

    def reset(self) -> None:
        """Forget all rows, between steps: the tables have others."""
        with self._lock:
            for group in self._groups:
                group.slots = RowSlots(len(group.tables.values_RD), group.num_slots)

    @abstractmethod
    def settle(self) -> None:
        """Take note of the steps so far, as the next one begins."""

    @abstractmethod
    def wait_for(self, rows_G: Sequence[RowsToSend]) -> None:
        """Have the device wait for rows that are admitted."""

    def _release(self, slots: RowSlots, held_U: Ints) -> None:
        slots.release(held_U)

    @abstractmethod
    def _move(self, others: Sequence[RowsToSend], placed: Sequence[PlacedRows]) -> list[RowsToSend]:
        """Have placed rows move; return the others, of groups without a cache, and these where a
        step takes them."""


@final
class HostMover(RowMover):
    """Moves rows between memory and a file."""

    def settle(self) -> None:
        """Do nothing: a step that has been taken is done."""

    def wait_for(self, rows_G: Sequence[RowsToSend]) -> None:
        """Do nothing: rows that are admitted are there."""

    def _move(self, others: Sequence[RowsToSend], placed: Sequence[PlacedRows]) -> list[RowsToSend]:
        for one in placed:
            group, change = one.group, one.change
            for chunk in chunks(change.written_row.size):
                slots = torch.from_numpy(change.written_slot[chunk])
                group.write(change.written_row[chunk], group.copy_slots(slots))
            for chunk in chunks(change.read_row.size):
                slots = torch.from_numpy(change.read_slot[chunk])
                group.fill_slots(slots, group.read(change.read_row[chunk]))
        return [*others, *(one.rows for one in placed)]


@final
class DeviceMover(RowMover):
    """Moves rows between a GPU and memory of its host, or a file, in one copy each way a step,
    beside the steps before: what computes waits for none."""

    def __init__(self, groups: Sequence[CachedGroup], device: torch.device) -> None:
        super().__init__(groups)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._dropped: deque[tuple[RowSlots, Ints]] = deque()
        self._settled: torch.cuda.Event | None = None
        self._on_the_way_out: list[_RowsOut] = []

    def settle(self) -> None:
        """Have the slots that the steps so far held be free once the device has done these."""
        if not self._dropped:
            return
        event = torch.cuda.Event()
        event.record()
        # Before the slots are free: who gets one of them waits for this event, or a later one.
        self._settled = event
        while self._dropped:
            slots, held_U = self._dropped.popleft()
            slots.release(held_U)

    def wait_for(self, rows_G: Sequence[RowsToSend]) -> None:
        """Have the device wait until rows are in the cache; the host does not."""
        for rows in rows_G:
            if rows.hold is not None:
                torch.cuda.current_stream(self._device).wait_event(rows.hold.ready)

    def flush(self) -> None:
        """Write the changed rows of all caches to the tables, between steps."""
        with self._lock:  # to the end: what another step pushes out meanwhile would be missed
            self._finish_writing()
            super().flush()

    def reset(self) -> None:
        """Forget all rows, between steps: the tables have others."""
        with self._lock:
            self._on_the_way_out.clear()
            super().reset()

    def _release(self, slots: RowSlots, held_U: Ints) -> None:
        self._dropped.append((slots, held_U))

    def _move(self, others: Sequence[RowsToSend], placed: Sequence[PlacedRows]) -> list[RowsToSend]:
        # What left the cache with the step before may be read again.
        self._finish_writing()
        parts = tuple(
            _RowsIn(
                one.rows,
                torch.from_numpy(one.change.written_slot),
                torch.from_numpy(one.change.read_slot),
                tuple(one.group.read(one.change.read_row)),
            )
            for one in placed
        )
        packed = pack([(tuple(others), parts)])[0]
        ready = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            if self._settled is not None:
                self._stream.wait_event(self._settled)
            block = packed.full_block.to(self._device, non_blocking=True)
            others, there = replace(packed, full_block=block).tree()
            pairs = list(zip(placed, there, strict=True))
            self._send_out(pairs)
            for one, part in pairs:
                one.group.fill_slots(part.read_slot, part.values)
                part.rows.hold.ready = ready
            ready.record(self._stream)
        # Or its memory would be given out while a step reads rows' numbers there.
        block.record_stream(torch.cuda.current_stream(self._device))
        return [*others, *(part.rows for part in there)]

    def _send_out(self, pairs: "Sequence[tuple[PlacedRows, _RowsIn]]") -> None:
        leaving = [(one, part) for one, part in pairs if one.change.written_row.size]
        if not leaving:
            return
        values = [
            value.flatten()
            for one, part in leaving
            for value in one.group.copy_slots(part.written_slot)
        ]
        flat = torch.cat(values)
        on_host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        on_host.copy_(flat, non_blocking=True)
        is_there = torch.cuda.Event()
        is_there.record(self._stream)
        sizes = [value.numel() for value in values]
        self._on_the_way_out.append(_RowsOut([one for one, _ in leaving], on_host, sizes, is_there))

    def _finish_writing(self) -> None:
        for out in self._on_the_way_out:
            out.is_there.synchronize()
            values = iter(out.on_host.split(out.sizes))
            for one in out.placed:
                row_U = one.change.written_row
                own = [next(values).view(row_U.size, -1) for _ in one.group.parts]
                one.group.write(row_U, own)
        self._on_the_way_out.clear()


def make_mover(groups: Sequence[CachedGroup], device: torch.device) -> RowMover:
    """Return the mover of these groups, whose caches are on the device."""
    return HostMover(groups) if device.type == "cpu" else DeviceMover(groups, device)
