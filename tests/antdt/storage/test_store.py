"""One contract for every store, and what only a real file can do wrong."""

import errno
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gmeta.antdt.errors import StoreFailedError, StoreFullError, StoreTakenError, StoreVersionError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.ledger import extend_chain
from gmeta.antdt.manifests.shard_manifest import ShardManifest
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.sqlite_store import SqliteStore
from gmeta.antdt.storage.store import MemoryDisk, MemoryStore, Store
from gmeta.antdt.storage.store_records import RecordBatch, StoredSnapshot, seal_of
from tests.antdt.driver import FakeClock
from tests.support.refusals import catch_message

Open = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store again and again; the file's lock is given free in between."""
    disk = MemoryDisk()
    stores: list[Store] = []

    def open_again() -> Store:
        if stores and request.param == "sqlite":
            stores.pop().close()
        stores.append(
            MemoryStore(disk) if request.param == "memory" else SqliteStore(tmp_path / "s.db")
        )
        return stores[-1]

    return open_again


def batch(first_event: int, *records: bytes) -> RecordBatch:
    return RecordBatch(first_event, list(records), bytes([first_event]) * 32)


def plain(batches: list[RecordBatch]) -> list[tuple[int, list[bytes], bytes]]:
    return [(item.first_event, list(item.records), item.head) for item in batches]


def test_each_claim_counts_the_service_epoch_up(opened: Open) -> None:
    assert [opened().claim() for _ in range(3)] == [1, 2, 3]


def test_appended_batches_come_back_in_order(opened: Open) -> None:
    store = opened()
    store.claim()
    written = [batch(0, b'["a"]', b'["b"]'), batch(2, b'["c"]')]
    for item in written:
        store.append(item)
    store.sync()
    snapshot, batches = opened().load()
    assert snapshot is None
    assert plain(batches) == plain(written)


def test_a_snapshot_takes_the_place_of_the_batches_that_it_covers(opened: Open) -> None:
    store = opened()
    store.claim()
    store.append(batch(0, b'["a"]', b'["b"]'))
    store.write_snapshot(StoredSnapshot(2, b"h" * 32, "{}", {("d", 0): b"\1\2"}))
    store.append(batch(2, b'["c"]'))
    store = opened()
    snapshot, batches = store.load()
    assert snapshot == StoredSnapshot(2, b"h" * 32, "{}", {("d", 0): b"\1\2"})
    assert plain(batches) == plain([batch(2, b'["c"]')])


def test_a_snapshot_replaces_pages_and_drops_those_of_cleared_datasets(opened: Open) -> None:
    store = opened()
    store.claim()
    store.write_snapshot(
        StoredSnapshot(0, b"", "{}", {("d", 0): b"a", ("d", 1): b"b", ("e", 0): b"c"})
    )
    store.write_snapshot(StoredSnapshot(0, b"", "{}", {("d", 1): b"B"}))
    store.write_snapshot(StoredSnapshot(0, b"", "{}", {("e", 7): b"E"}, frozenset({"e"})))
    snapshot, _ = opened().load()
    assert snapshot is not None
    assert snapshot.pages == {("d", 0): b"a", ("d", 1): b"B", ("e", 7): b"E"}


def test_an_older_holder_can_write_nothing_after_a_take_over(tmp_path: Path) -> None:
    """Without the file lock, as on a network file system: the service epoch is the fence."""
    path = tmp_path / "s.db"
    old = SqliteStore(path)
    old.claim()
    (tmp_path / "s.db.lock").unlink()
    new = SqliteStore(path)
    new.claim()
    message = (
        f"{path} was taken over by a service with epoch 2, this one has 1; a store has one service."
    )
    for write in (
        lambda: old.append(batch(0, b"x")),
        lambda: old.write_snapshot(StoredSnapshot(0, b"", "")),
    ):
        assert catch_message(StoreTakenError, write) == f"{message} Stop one of the two."
    new.append(batch(0, b"y"))
    assert plain(new.load()[1]) == plain([batch(0, b"y")])


def test_memory_stores_fence_an_older_holder_too() -> None:
    disk = MemoryDisk()
    old, new = MemoryStore(disk), MemoryStore(disk)
    old.claim()
    new.claim()
    with pytest.raises(StoreTakenError):
        old.append(batch(0, b"x"))


def test_a_second_service_on_the_file_is_refused_at_once(tmp_path: Path) -> None:
    held = SqliteStore(tmp_path / "s.db")
    with pytest.raises(StoreTakenError) as taken:
        SqliteStore(tmp_path / "s.db")
    assert "is held by another service (process " in str(taken.value)
    held.close()
    SqliteStore(tmp_path / "s.db").close()


def test_a_database_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "s.db").close()
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.execute("PRAGMA user_version=5")
    before = (tmp_path / "s.db").read_bytes()
    assert catch_message(StoreVersionError, SqliteStore, tmp_path / "s.db") == (
        f"{tmp_path / 's.db'} has store version 5; this program reads up to 4. Use the newer "
        "version of gmeta that wrote it, or another --store."
    )
    assert (tmp_path / "s.db").read_bytes() == before


@pytest.mark.parametrize("version", [1, 3])
def test_an_older_store_is_taken_over_with_its_leases(tmp_path: Path, version: int) -> None:
    """As versions before second leases, and before readings, wrote it: no such key."""
    committer = Committer(SqliteStore(tmp_path / "s.db"), FakeClock(), lease_ttl_s=30.0)
    committer.commit([cmd.RegisterDataset(DatasetSpec("d", 4, 2)), cmd.Register("a", "p", None)])
    caller = Caller("a", "p", 1, 1)
    (granted,) = committer.commit([cmd.LeaseShards(caller, 1, "d", 0, 1)])
    committer.snapshot()
    with closing(sqlite3.connect(tmp_path / "s.db")) as db, db:
        document = json.loads(db.execute("SELECT document FROM snapshot").fetchone()[0])
        del document["readings"], document["run"]
        if version == 1:
            del document["backups_wanted"], document["twins"]
        assert "speculative" not in document["tables"][0]["spec"]
        db.create_function("seal_of", 3, seal_of)
        db.execute("UPDATE snapshot SET document = ?", (json.dumps(document),))
        db.execute("UPDATE snapshot SET seal = seal_of(num_events, head, document)")
        if version == 1:
            db.execute("ALTER TABLE snapshot DROP COLUMN seal")
        db.execute(f"PRAGMA user_version={version}")
    committer._store.close()
    store = SqliteStore(tmp_path / "s.db")
    assert store._db.execute("PRAGMA user_version").fetchone()[0] == 4
    again = Committer(store, FakeClock(), lease_ttl_s=30.0)
    (registered,) = again.commit([cmd.Register("a", "p", None)])
    assert registered.leases == granted.grants
    store.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreFailedError) as failed:
        SqliteStore(tmp_path / "s.db")
    assert "failed with SQLITE_NOTADB" in str(failed.value)


@pytest.mark.parametrize("document", ["{", "[]", '{"service_epoch": 1}'])
def test_a_damaged_snapshot_is_told_as_one(tmp_path: Path, document: str) -> None:
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    Committer(store, FakeClock()).snapshot()
    store.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.create_function("seal_of", 3, seal_of)
        db.execute("UPDATE snapshot SET document = ?", (document,))
        db.execute("UPDATE snapshot SET seal = seal_of(num_events, head, document)")
    with pytest.raises(StoreFailedError, match=r"the store is damaged\. Restore it from a backup"):
        Committer(SqliteStore(path), FakeClock())


def test_an_altered_record_is_found_before_it_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    Committer(store, FakeClock()).commit([cmd.Register("a", "p0", None)])
    store.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE log SET records = ? WHERE first_event = 1", (b'["expire",[77]]',))
    assert catch_message(StoreFailedError, Committer, SqliteStore(path), FakeClock()).startswith(
        "the ledger's hash chain is broken: the records before event 2 were altered. "
    )


def poisoned(spec: DatasetSpec) -> str:
    """A manifest as an older version took it in: the digest fits, the epoch is a word."""
    body = json.loads(ShardManifest("default", "c", 1, 1, "", 7, "00").to_json())
    del body["digest"]
    entry = {name: [] for name in ("done", "partial", "skipped", "quarantined")}
    body["datasets"] = [{"spec": spec.to_dict(), "epoch": "one", **entry}]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "digest": hashlib.sha256(text.encode()).hexdigest()})


def test_a_record_that_an_older_version_took_in_unchecked_is_told_in_one_line() -> None:
    disk = MemoryDisk()
    Committer(MemoryStore(disk), FakeClock()).commit([cmd.Register("w", "p", None)])
    record = ev.encode(ev.StateRestored("r", "w", 2, "", poisoned(DatasetSpec("d", 8, 4))))
    num_events = sum(len(each.records) for each in disk.log)
    disk.log.append(RecordBatch(num_events, [record], extend_chain(disk.log[-1].head, record)))
    message = catch_message(StoreFailedError, Committer, MemoryStore(disk), FakeClock())
    assert message.startswith(f"the store's event {num_events + 1} cannot be applied: ")
    assert "epoch is 'one'; allowed is a value of type int" in message
    assert message.endswith(
        "Restore the store from a backup, or delete it: the manifest in a checkpoint rebuilds the "
        "service."
    )


def test_a_snapshot_of_an_epoch_that_is_no_number_is_told_as_damage() -> None:
    disk = MemoryDisk()
    committer = Committer(MemoryStore(disk), FakeClock())
    committer.commit([cmd.RegisterDataset(DatasetSpec("d", 8, 4))])
    committer.snapshot()
    assert disk.snapshot is not None
    document = disk.snapshot.document.replace('"epoch":0', '"epoch":"one"')
    assert document != disk.snapshot.document
    disk.snapshot = replace(disk.snapshot, document=document)
    with pytest.raises(StoreFailedError, match=r"cannot be read .*epoch is 'one'"):
        Committer(MemoryStore(disk), FakeClock())


def test_a_disk_that_cannot_sync_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    assert catch_message(StoreFailedError, SqliteStore, tmp_path / "s.db") == (
        f"the store {tmp_path / 's.db'} failed: Invalid argument. Name one on a local disk with "
        "--store."
    )


def test_a_full_disk_rolls_the_batch_back_and_later_appends_work(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    store.claim()
    store.append(batch(0, b"kept"))
    store._db.execute("PRAGMA max_page_count=8")
    assert catch_message(StoreFullError, store.append, batch(1, b"x" * 100_000)) == (
        f"the disk under {tmp_path / 's.db'} is full: the call was not applied. Free space; the "
        "service continues by itself."
    )
    store._db.execute("PRAGMA max_page_count=1000000")
    store.append(batch(1, b"after"))
    assert plain(store.load()[1]) == plain([batch(0, b"kept"), batch(1, b"after")])


def test_a_disk_that_fails_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "s.db")
    store.claim()
    store.append(batch(0, b"a"))

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    assert catch_message(StoreFailedError, store.sync) == (
        f"the disk under {tmp_path / 's.db'} failed to write: Input/output error. What was not yet "
        "acknowledged may be lost. Check the disk, then start the service again."
    )


def test_a_missing_record_is_found_before_anything_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    committer = Committer(store, FakeClock())
    for worker_id in ("a", "b"):
        committer.commit([cmd.Register(worker_id, "p", None)])
    store.close()
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute("DELETE FROM log WHERE first_event = 1").rowcount == 1
    assert catch_message(StoreFailedError, Committer, SqliteStore(path), FakeClock()) == (
        "the ledger's hash chain is broken: event 1 is missing. The store was damaged or edited: "
        "restore it from a backup, or delete it: the manifest in a checkpoint rebuilds the service."
    )
