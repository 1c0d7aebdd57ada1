"""Where the ledger survives: the contract of a store, which tests/antdt/storage/test_store.py holds
all to, and the store in memory, for tests and jobs that rely on the manifest in the checkpoint."""

import abc
from dataclasses import replace
from typing import final

from gmeta.antdt.errors import StoreFailedError, StoreTakenError
from gmeta.antdt.storage.store_records import RecordBatch, StoredSnapshot


class Store(abc.ABC):
    """The contract: one writer; a method takes effect, or raises StoreError and changes nothing."""

    @abc.abstractmethod
    def claim(self) -> int:
        """Count the service epoch up, durably, and return it. An older holder fails from then."""

    @abc.abstractmethod
    def load(self) -> tuple[StoredSnapshot | None, list[RecordBatch]]:
        """Return the last snapshot and every batch after it, in order."""

    @abc.abstractmethod
    def append(self, batch: RecordBatch) -> None:
        """Store one batch; it survives this process, but a power cut only after `sync`: that takes
        batches from the end. Raise StoreTakenError when another service claimed the store."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Make all batches so far survive a power cut. May run in a thread beside `append`."""

    @abc.abstractmethod
    def write_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Replace the snapshot, and drop the batches that it covers. Raise StoreTakenError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the store."""


@final
class MemoryDisk:
    """What survives a MemoryStore; a new store on the same disk is a restarted service."""

    def __init__(self) -> None:
        self.epoch = 0
        self.log: list[RecordBatch] = []
        self.num_synced = 0  # batches of the log that a power cut spares
        self.snapshot: StoredSnapshot | None = None


@final
class MemoryStore(Store):
    """Keeps everything on a MemoryDisk, with the durability rules of a real one."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = MemoryDisk() if disk is None else disk
        self._epoch = 0

    def claim(self) -> int:
        """Count the disk's epoch up."""
        self.disk.epoch += 1
        self._epoch = self.disk.epoch
        return self._epoch

    def load(self) -> tuple[StoredSnapshot | None, list[RecordBatch]]:
        """Return what the disk holds; nothing here can be damaged."""
        return self.disk.snapshot, list(self.disk.log)

    def append(self, batch: RecordBatch) -> None:
        """Add the batch to the disk's log, unsynced."""
        check_epoch("the memory store", self.disk.epoch, self._epoch)
        self.disk.log.append(RecordBatch(batch.first_event, tuple(batch.records), batch.head))

    def sync(self) -> None:
        """Note that a power cut spares the whole log."""
        self.disk.num_synced = len(self.disk.log)

    def write_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Put the pages over the older ones, drop the covered batches, and sync."""
        check_epoch("the memory store", self.disk.epoch, self._epoch)
        old = self.disk.snapshot.pages if self.disk.snapshot else {}
        kept = {key: page for key, page in old.items() if key[0] not in snapshot.cleared}
        self.disk.snapshot = replace(
            snapshot, pages={**kept, **snapshot.pages}, cleared=frozenset()
        )
        self.disk.log = [x for x in self.disk.log if x.first_event >= snapshot.num_events]
        self.sync()

    def close(self) -> None:
        """Do nothing: a memory store has no lock."""


def check_epoch(store: str, stored_epoch: int, mine: int) -> None:
    """Raise StoreTakenError where a newer service claimed the store."""
    if stored_epoch != mine:
        raise StoreTakenError(
            f"{store} was taken over by a service with epoch {stored_epoch}, this one has {mine}; "
            "a store has one service. Stop one of the two."
        )


def damage_error(what: str) -> StoreFailedError:
    """Return the error for a store whose content cannot be what a service wrote."""
    return StoreFailedError(
        f"{what}: the store is damaged. Restore it from a backup, or delete it: the manifest in a "
        "checkpoint rebuilds the service."
    )
