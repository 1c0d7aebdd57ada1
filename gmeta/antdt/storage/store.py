"""Where the ledger survives: an append-only log of events, snapshots of the state, and the
service epoch.

One store has one writer. The contract, and the store in memory, which serves tests and jobs that
rely on the checkpoint's manifest alone. tests/antdt/storage/test_store.py holds every store to it.
"""

import abc
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from gmeta.antdt.errors import StoreTakenError
from gmeta.antdt.storage.stored import Batch, Snapshot


class Store(abc.ABC):
    """The contract. Every method either takes effect as a whole or raises StoreError and changes
    nothing."""

    @abc.abstractmethod
    def claim(self) -> int:
        """Takes the store over: counts the service epoch up, durably, and returns it. An older
        holder fails from then on."""

    @abc.abstractmethod
    def load(self) -> tuple[Snapshot | None, list[Batch]]:
        """The last snapshot and every batch after it, in order."""

    @abc.abstractmethod
    def append(self, batch: Batch) -> None:
        """Stores one batch; it survives this process, but a power cut only after `sync`.

        Batches are lost in a power cut from the last one backwards, never one from the middle.
        Raises StoreTakenError when another service claimed the store.
        """

    @abc.abstractmethod
    def sync(self) -> None:
        """Every batch appended before survives a power cut. May run beside `append`, in another
        thread."""

    @abc.abstractmethod
    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Replaces the snapshot; the log stays. Raises StoreTakenError when another service claimed
        the store."""

    @abc.abstractmethod
    def read_log(self) -> Iterator[Batch]:
        """The whole log from the first event on, for audits."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the store free."""


@final
class MemoryDisk:
    """What survives a MemoryStore; a new store on the same disk is a restarted service."""

    def __init__(self) -> None:
        self.epoch = 0
        self.log: list[Batch] = []
        self.num_synced = 0  # batches of the log that a power cut spares
        self.snapshot: Snapshot | None = None


@final
class MemoryStore(Store):
    """Keeps everything on a MemoryDisk, with the durability rules of a real one."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = MemoryDisk() if disk is None else disk
        self._epoch = 0

    def claim(self) -> int:
        """See Store.claim."""
        self.disk.epoch += 1
        self._epoch = self.disk.epoch
        return self._epoch

    def load(self) -> tuple[Snapshot | None, list[Batch]]:
        """See Store.load."""
        snapshot = self.disk.snapshot
        num_events = snapshot.num_events if snapshot else 0
        return snapshot, [batch for batch in self.disk.log if batch.first_event >= num_events]

    def append(self, batch: Batch) -> None:
        """See Store.append."""
        check_epoch("the memory store", self.disk.epoch, self._epoch)
        self.disk.log.append(Batch(batch.first_event, tuple(batch.records), batch.head))

    def sync(self) -> None:
        """See Store.sync."""
        self.disk.num_synced = len(self.disk.log)

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """See Store.write_snapshot."""
        check_epoch("the memory store", self.disk.epoch, self._epoch)
        old = self.disk.snapshot.pages if self.disk.snapshot else {}
        kept = {key: page for key, page in old.items() if key[0] not in snapshot.cleared}
        self.disk.snapshot = replace(
            snapshot, pages={**kept, **snapshot.pages}, cleared=frozenset()
        )
        self.sync()

    def read_log(self) -> Iterator[Batch]:
        """See Store.read_log."""
        return iter(list(self.disk.log))

    def close(self) -> None:
        """See Store.close."""


def check_epoch(store: str, found: int, mine: int) -> None:
    """Raises StoreTakenError where a newer service claimed the store."""
    if found != mine:
        raise StoreTakenError(
            f"{store} was taken over by a service with epoch {found}, this one has {mine}; a "
            "store has one service. Stop one of the two."
        )
