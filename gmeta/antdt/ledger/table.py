"""The state of every shard of a dataset's epoch: one byte a shard, by position in its order."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import final

from gmeta.access.errors import RefusedError
from gmeta.antdt.model import MAX_DATASETS, MAX_SHARDS_IN_ALL, DatasetSpec, Grant, ShardState
from gmeta.antdt.order import ShardOrder

SHARDS_PER_PAGE = 4096  # one row of the store: 1e7 shards load in 29 ms

# ShardState.DONE is 2. An epoch in progress has few runs of it, however many shards it has.
_DONE_RUN = re.compile(b"\x02+")
_READY_BYTE = bytes([ShardState.READY])


@final
class ShardTable:
    """Shard states, and the sparse facts that only a few shards have: offset, attempts, note."""

    def __init__(self, spec: DatasetSpec, epoch: int = 0) -> None:
        self.spec = spec
        self.open_epoch(epoch)

    def open_epoch(self, epoch: int) -> None:
        """Make every shard READY, in the order of `epoch`."""
        self.epoch = epoch
        self.order = ShardOrder(self.spec.num_shards, self.spec.seed, epoch, self.spec.shuffle)
        self.states = bytearray(self.spec.num_shards)
        self.counts = [self.spec.num_shards, 0, 0, 0, 0]
        # By position, of shards that are not DONE: units at the front that are in the model, failed
        # attempts, and the last failure or the reason why it was skipped.
        self.units_done: dict[int, int] = {}
        self.attempts: dict[int, int] = {}
        self.notes: dict[int, str] = {}
        # DONE intervals of the last committed checkpoint.
        self.committed: list[tuple[int, int]] = []
        self.first_ready = 0  # no position before it is READY
        self.dirty_pages: set[int] = set()
        self.cleared = True  # the store may still hold pages of an earlier epoch

    @property
    def finished(self) -> bool:
        """Return whether every shard is DONE or SKIPPED: END has no other condition."""
        num_finished = self.counts[ShardState.DONE] + self.counts[ShardState.SKIPPED]
        return num_finished == self.spec.num_shards

    @property
    def num_committed(self) -> int:
        """Return how many DONE shards the last committed checkpoint holds."""
        return sum(end - start for start, end in self.committed)

    def state_of(self, position: int) -> ShardState:
        """Return the state at `position`."""
        return ShardState(self.states[position])

    def set_state(self, position: int, state: ShardState) -> None:
        """Move one shard to a state, with the counts, the search hint and the dirty pages."""
        self.counts[self.states[position]] -= 1
        self.counts[state] += 1
        self.states[position] = state
        self.dirty_pages.add(position // SHARDS_PER_PAGE)
        if state == ShardState.READY:
            self.first_ready = min(self.first_ready, position)
        elif state == ShardState.DONE:
            self.units_done.pop(position, None)
            self.attempts.pop(position, None)
            self.notes.pop(position, None)

    def next_ready(self, max_shards: int) -> list[int]:
        """Return up to `max_shards` READY positions, smallest first."""
        # The states alone decide the order: there is no queue that could disagree with them.
        positions: list[int] = []
        position = self.states.find(_READY_BYTE, self.first_ready)
        self.first_ready = position if position >= 0 else len(self.states)
        while position >= 0 and len(positions) < max_shards:
            positions.append(position)
            position = self.states.find(_READY_BYTE, position + 1)
        return positions

    def give_back(
        self, position: int, counts_attempt: bool, note: str = "", still_held: bool = False
    ) -> None:
        """Return a DOING shard: READY with its offset, or QUARANTINED after too many attempts."""
        if counts_attempt:
            self.attempts[position] = self.attempts.get(position, 0) + 1
        if note:
            self.notes[position] = note
        # By another worker, which may complete it.
        if still_held:
            return
        exhausted = self.attempts.get(position, 0) > self.spec.max_attempts
        self.set_state(position, ShardState.QUARANTINED if exhausted else ShardState.READY)

    def grant(self, token: int, position: int, units_done: int, attempts: int) -> Grant:
        """Return the wire form of one lease."""
        spec, index = self.spec, self.order.index_of(position)
        shard = self.epoch, index, spec.start_of(index), spec.length_of(index)
        return Grant(token, spec.name, *shard, units_done, attempts, spec.speculative)

    def length_at(self, position: int) -> int:
        """Return the units of the shard at `position`."""
        return self.spec.length_of(self.order.index_of(position))

    def done_intervals(self) -> list[tuple[int, int]]:
        """Return the maximal runs [start, end) of DONE positions."""
        return [match.span() for match in _DONE_RUN.finditer(self.states)]

    def positions_in(
        self, state: ShardState, start: int = 0, end: int | None = None
    ) -> Iterator[int]:
        """Yield the positions in [start, end) that are in `state`, ascending."""
        wanted = bytes([state])
        position = self.states.find(wanted, start, end)
        while position >= 0:
            yield position
            position = self.states.find(wanted, position + 1, end)

    def page(self, number: int) -> bytes:
        """Return the bytes of one page."""
        return bytes(self.states[number * SHARDS_PER_PAGE : (number + 1) * SHARDS_PER_PAGE])

    def load_pages(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Load stored pages into a fresh table; pages that were never stored are all READY."""
        for number, page in pages:
            self.states[number * SHARDS_PER_PAGE : number * SHARDS_PER_PAGE + len(page)] = page
        self.recount()

    def mark_all_dirty(self) -> None:
        """Have every page that is not all READY stored again."""
        num_pages = -(-len(self.states) // SHARDS_PER_PAGE)
        # A page that is not stored stands for READY alone, see load_pages.
        self.dirty_pages = {n for n in range(num_pages) if self.page(n).strip(_READY_BYTE)}

    def recount(self) -> None:
        """Derive the counts and the search hint from the states."""
        self.counts = [self.states.count(bytes([state])) for state in ShardState]
        self.first_ready = 0


def find_table(tables: Mapping[str, ShardTable], dataset: str) -> ShardTable:
    """Return the dataset's table. Raise RefusedError for an unknown name."""
    table = tables.get(dataset)
    if table is None:
        raise RefusedError(
            "NOT_FOUND",
            "UNKNOWN_DATASET",
            # Cut, both the name and the list: either could be more than a status may carry.
            f"dataset {dataset!r:.130} is unknown; registered: "
            f"{', '.join(sorted(tables)[:20]) or 'none'}. Name one of these, or register it.",
        )
    return table


def is_new_dataset(tables: Mapping[str, ShardTable], spec: DatasetSpec) -> bool:
    """Return False for the same spec again. Raise RefusedError for another one of the name."""
    table = tables.get(spec.name)
    if table is None:
        check_capacity(tables, [spec])
        return True
    if table.spec != spec:
        known, given = asdict(table.spec), asdict(spec)
        old = {name: value for name, value in known.items() if given[name] != value}
        new = {name: given[name] for name in old}
        raise RefusedError(
            "ALREADY_EXISTS",
            "SPEC_CONFLICT",
            f"dataset {spec.name!r} is registered with {old}, the call says {new}; a name stands "
            "for one dataset. "
            "Register the other data under another name, or start a service with an empty store.",
        )
    return False


def check_capacity(tables: Mapping[str, ShardTable], specs: Sequence[DatasetSpec]) -> None:
    """Raise RefusedError unless the service has room for these datasets beside its own."""
    # A shard takes a byte: the bound on all of them together is one on memory.
    num_shards = sum(table.spec.num_shards for table in tables.values())
    num_shards += sum(spec.num_shards for spec in specs)
    if len(tables) + len(specs) > MAX_DATASETS:
        message = f"{len(tables)} datasets are registered; at most {MAX_DATASETS}"
    elif num_shards > MAX_SHARDS_IN_ALL:
        message = f"all datasets would have {num_shards} shards; at most {MAX_SHARDS_IN_ALL}"
    else:
        return
    message += " are allowed. Start another service."
    raise RefusedError("RESOURCE_EXHAUSTED", "LIMIT", message)
