"""Altered, lost, old and long-used stores: all that was acknowledged is served, or why not."""

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gmeta.antdt.errors import StoreError, StoreFailedError, StoreNameError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import Caller, DatasetSpec
from gmeta.antdt.storage import sqlite_store
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.snapshot import take_snapshot
from gmeta.antdt.storage.sqlite_store import SqliteStore
from gmeta.antdt.storage.store import MemoryDisk, MemoryStore
from tests.antdt.driver import FakeClock, Service
from tests.support.refusals import catch_message

FILES = ("s.db", "s.db-wal", "s.db.durable")
REBUILD = "or delete it: the manifest in a checkpoint rebuilds the service."


def complete(committer: Committer, shards: int, first_seq: int = 1) -> None:
    """Worker a leases and completes one shard after the other."""
    caller = Caller("a", "p", committer.service_epoch, 1)
    for seq in range(first_seq, first_seq + 2 * shards, 2):
        (granted,) = committer.commit([cmd.LeaseShards(caller, seq, "d", 0, 1)])
        committer.commit([cmd.Complete(caller, seq + 1, (granted.grants[0].token,))])


def used(folder: Path, **options: int) -> Committer:
    """A service in the folder with some shards in the snapshot, and some in the log alone."""
    committer = Committer(SqliteStore(folder / "s.db"), FakeClock(), **options)
    committer.commit([cmd.RegisterDataset(DatasetSpec("d", 9000, 1)), cmd.Register("a", "p", None)])
    complete(committer, 6)
    committer.snapshot()
    complete(committer, 5, 13)
    return committer


def copied(source: Path, target: Path) -> Path:
    """The files as a kill -9 leaves them."""
    target.mkdir()
    for name in FILES:
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    return target


def content(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """All that a service on the folder serves, but its service epoch. Raises StoreError."""
    store = SqliteStore(folder / "s.db")
    try:
        state = Committer(store, FakeClock()).ledger.state
    finally:
        store.close()
    document = json.loads(take_snapshot(state, 0, b"").document)
    del document["service_epoch"], document["token_counter"]
    return document, {name: bytes(table.states) for name, table in state.tables.items()}


@pytest.mark.parametrize("file", ["s.db", "s.db-wal"])
def test_one_bit_is_found_or_changes_nothing(tmp_path: Path, file: str) -> None:
    """In the closed file, all of which is a snapshot, and in the log of a killed service."""
    (tmp_path / "live").mkdir()
    committer = used(tmp_path / "live")
    if file == "s.db":
        committer.snapshot()
        committer._store.close()
    sound = copied(tmp_path / "live", tmp_path / "sound")
    expected = content(copied(sound, tmp_path / "whole"))
    assert expected[1]["d"].count(2) == 11
    damaged, draw, refusals = tmp_path / "damaged", random.Random(1), list[str]()
    whole = (sound / file).read_bytes()
    # Each byte that is not zero is of the content or of its structure; every third of them.
    for offset in [at for at, byte in enumerate(whole) if byte][:: 3 if file == "s.db" else 97]:
        copied(sound, damaged)
        altered = bytearray(whole)
        altered[offset] ^= 1 << draw.randrange(8)
        (damaged / file).write_bytes(altered)
        try:
            assert content(damaged) == expected, f"{file} serves something else: byte {offset}"
        except StoreError as error:
            refusals.append(str(error))
        shutil.rmtree(damaged)
    assert len(refusals) > 20
    assert not any("\n" in refusal for refusal in refusals)
    if file != "s.db":
        committer._store.close()


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("UPDATE pages SET states = zeroblob(4096) WHERE page = 0", "pages of dataset 'd' do not"),
        ("DELETE FROM pages", "pages of dataset 'd' do not describe its 9000 shards"),
        ("UPDATE snapshot SET num_events = num_events + 1", "snapshot of the store"),
        ("UPDATE snapshot SET head = zeroblob(32)", "snapshot of the store"),
        ("UPDATE snapshot SET seal = NULL", "snapshot of the store"),
        ("UPDATE meta SET value = 0", "the store counts service epoch 1, and its ledger knows 1"),
        ("UPDATE meta SET value = 1 << 40", "the store counts service epoch 1099511627777, and"),
        ("DELETE FROM meta", "has no service epoch"),
    ],
)
def test_an_altered_snapshot_is_refused(tmp_path: Path, page: str, told: str) -> None:
    used(tmp_path)._store.close()
    with closing(sqlite3.connect(tmp_path / "s.db")) as db, db:
        db.execute(page)
    message = catch_message(StoreFailedError, content, tmp_path)
    assert told in message
    assert message.endswith(f": the store is damaged. Restore it from a backup, {REBUILD}")


def cut_wal(folder: Path) -> None:
    with (folder / "s.db-wal").open("r+b") as wal:
        wal.truncate(wal.seek(0, 2) - 1)


def empty_tables(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "s.db")) as db:
        db.executescript("DELETE FROM log; DELETE FROM pages; DELETE FROM snapshot;")


@pytest.mark.parametrize(
    ("lose", "num_left"),
    [
        (cut_wal, 22),
        (lambda folder: (folder / "s.db-wal").unlink(), 0),
        (lambda folder: [(folder / name).write_bytes(b"") for name in FILES[:2]], 0),
        (empty_tables, 0),
    ],
)
def test_a_store_that_lost_what_was_durable_is_refused(
    tmp_path: Path, lose: Callable[[Path], Any], num_left: int
) -> None:
    (tmp_path / "live").mkdir()
    committer = used(tmp_path / "live")
    killed = copied(tmp_path / "live", tmp_path / "killed")
    committer._store.close()
    lose(killed)
    for _ in range(2):  # a refused start makes nothing of it that the next one would believe
        message = catch_message(StoreFailedError, content, killed)
    assert message == (
        f"the store {killed / 's.db'} ends after {num_left + 2 if num_left else 0} events, and 25 "
        "were on the disk: its newest part was lost, and what was trained since would be offered "
        f"again. Restore it with its -wal and .durable from a backup, {REBUILD}"
    )


def test_a_deleted_store_begins_anew(tmp_path: Path) -> None:
    used(tmp_path)._store.close()
    (tmp_path / "s.db").unlink()
    assert content(tmp_path)[1] == {}


def test_a_folder_without_locks_is_not_told_as_another_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(sqlite_store.fcntl, "flock", refuse)
    assert catch_message(StoreNameError, SqliteStore, tmp_path / "s.db") == (
        f"the file {tmp_path / 's.db.lock'} cannot be locked and written: No locks available. Free "
        "space, or name a --store on a local disk."
    )


def test_a_store_of_version_2_is_taken_over_whole(tmp_path: Path) -> None:
    """As gmeta at 636ac16 left it, killed: a snapshot after 18 events, the whole log of 21, leases
    of one shard beside each other, a quarantined and a skipped one, two checkpoints."""
    script = Path(__file__).with_name("store_v2.sql").read_text()
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        db.executescript(script)
    store = SqliteStore(tmp_path / "s.db")
    committer = Committer(store, FakeClock())
    state = committer.ledger.state
    # Its own start comes behind the 21 events.
    assert (committer.service_epoch, committer.ledger.num_events) == (2, 22)
    expected = {"d": [3, 3, 3, 1, 0], "e": [0, 3, 0, 0, 0]}
    assert {name: table.counts for name, table in state.tables.items()} == expected
    first = 1 << 40
    assert sorted(state.leases) == [first + n for n in (3, 4, 7, 8, 9, 10, 12)]
    assert state.tables["d"].units_done == {2: 3}
    assert state.tables["d"].notes == {4: "corrupt"}
    assert [(c.step, c.committed) for c in state.checkpoints.values()] == [(10, True), (20, False)]
    committer.snapshot()
    store.close()
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (4,)
        assert db.execute("SELECT count(*) FROM log").fetchone() == (0,)
    again = content(tmp_path)[0]
    found = again["leases"]
    assert found == [[t, x.dataset, x.position, x.worker_id] for t, x in state.leases.items()]


def test_a_damaged_store_of_version_2_is_not_believed_either(tmp_path: Path) -> None:
    script = Path(__file__).with_name("store_v2.sql").read_text()
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        db.executescript(script)
        with db:
            db.execute("DELETE FROM log WHERE first_event = 19")
    with pytest.raises(StoreFailedError, match="event 19 is missing"):
        content(tmp_path)


def test_the_store_stays_small_however_many_commands_it_took(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    committer = Committer(store, FakeClock(), snapshot_every_events=100)
    spec = DatasetSpec("d", 100_000, 1)
    committer.commit([cmd.RegisterDataset(spec), cmd.Register("a", "p", None)])
    for turn in range(4):
        complete(committer, 1000, 1 + 2000 * turn)
        assert store._db.execute("SELECT count(*) FROM log").fetchone()[0] <= 100
        # SQLite writes over its WAL once that has 1,000 pages and nobody is in a transaction.
        assert (tmp_path / "s.db-wal").stat().st_size < 1100 * 4120
    assert committer.ledger.num_events == 8003
    store.close()
    assert (tmp_path / "s.db").stat().st_size < 400_000  # the whole log would have a megabyte more


def test_the_log_in_memory_is_cut_too() -> None:
    disk = MemoryDisk()
    service = Service(disk, snapshot_every_events=7)
    service.register_dataset(num_units=400, units_per_shard=1)
    worker = service.worker("a")
    for _ in range(40):
        worker.complete(worker.grant().token)
        assert len(MemoryStore(disk).load()[1]) <= 7


def test_a_kill_amid_a_snapshot_leaves_the_state_before_or_after_it(tmp_path: Path) -> None:
    """The WAL cut at each page of the snapshot's transaction, which also drops the log."""
    (tmp_path / "live").mkdir()
    committer = used(tmp_path / "live")
    wal = tmp_path / "live" / "s.db-wal"
    begin = wal.stat().st_size
    committer.snapshot()
    end = wal.stat().st_size
    assert end > begin
    # A killed service loses no written page: what a power cut leaves was not noted as durable.
    expected, frame = content(copied(tmp_path / "live", tmp_path / "whole")), 4096 + 24
    for size in range(begin, end + 1, frame):
        cut = copied(tmp_path / "live", tmp_path / f"cut{size}")
        with (cut / "s.db-wal").open("r+b") as file:
            file.truncate(size)
        assert content(cut) == expected
    committer._store.close()
