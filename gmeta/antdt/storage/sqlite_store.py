"""The default store: one SQLite file in WAL mode, whose commits share an fsync."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import final

from gmeta.antdt.errors import (
    StoreFailedError,
    StoreFullError,
    StoreNameError,
    StoreTakenError,
    StoreVersionError,
)
from gmeta.antdt.storage.store import Store, check_epoch, damage_error
from gmeta.antdt.storage.store_records import RecordBatch, StoredSnapshot, seal_of

# 2: second leases of a shard; a store of version 1 has none. 3: snapshots are sealed, and the log
# begins where the snapshot ends. 4: readings of the model, and what the trainer says of its run.
STORE_VERSION = 4
TAKEN = "is held by another service"  # also read from the log of a service that could not start

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE log (first_event INTEGER PRIMARY KEY, records BLOB NOT NULL, head BLOB NOT NULL);
CREATE TABLE pages (
    dataset TEXT, page INTEGER, states BLOB NOT NULL, PRIMARY KEY (dataset, page)
) WITHOUT ROWID;
CREATE TABLE snapshot (
    id INTEGER PRIMARY KEY CHECK (id = 1), num_events INTEGER, head BLOB, document TEXT, seal BLOB
);
INSERT INTO meta VALUES ('service_epoch', 0);
"""
_UPGRADE = """
ALTER TABLE snapshot ADD COLUMN seal BLOB;
UPDATE snapshot SET seal = seal_of(num_events, head, document);
DELETE FROM log WHERE first_event < (SELECT num_events FROM snapshot);
"""
# Nothing is inserted when another service has counted the epoch up.
_APPEND = """
INSERT INTO log SELECT ?, ?, ? FROM meta WHERE key = 'service_epoch' AND value = ?
"""


@final
class SqliteStore(Store):
    """One SQLite file; a batch survives the process after `append`, a power cut after `sync`."""

    def __init__(self, path: Path) -> None:
        """Create or open the file. Raise StoreError."""
        self.path = path
        self._epoch = 0
        # A store that does not open must not keep its lock or its descriptors.
        with ExitStack() as undo:
            self._lock_fd = _lock(path)
            undo.callback(os.close, self._lock_fd)
            with _translate_errors(path):
                self._durable_fd = _open_durable(path)
                undo.callback(os.close, self._durable_fd)
                self._num_events = self._num_durable = _read_durable(self._durable_fd)
                # Transactions are begun by hand; the writer's thread is not the one that opens.
                self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                undo.callback(self._db.close)
                self._prepare()
            undo.pop_all()

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        # A commit writes the WAL, `sync` makes it durable: so many commits can share one fsync, and
        # a commit need not wait for the one under way. SQLite still syncs around its checkpoints.
        self._db.execute("PRAGMA synchronous=NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > STORE_VERSION:
            raise StoreVersionError(
                f"{self.path} has store version {version}; this program reads up to "
                f"{STORE_VERSION}. "
                "Use the newer version of gmeta that wrote it, or another --store."
            )
        if version < STORE_VERSION:
            # From now on only this version can read all of it.
            self._db.create_function("seal_of", 3, seal_of, deterministic=True)
            script = ("" if version >= 3 else _UPGRADE) if version else _SCHEMA
            self._db.executescript(f"BEGIN;{script}PRAGMA user_version={STORE_VERSION};COMMIT;")
        # Else a page in use but listed as free would be noticed only when it is overwritten.
        elif self._db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise damage_error(f"the pages of the file {self.path} do not fit together")
        self._wal_fd = _open_wal(self._db, self.path)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _translate_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                # After some errors (a full disk) SQLite has rolled back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _check_epoch(self) -> None:
        stored_epoch = self._db.execute(
            "SELECT value FROM meta WHERE key='service_epoch'"
        ).fetchone()[0]
        check_epoch(str(self.path), stored_epoch, self._epoch)

    def claim(self) -> int:
        """Count the epoch up in one transaction, and sync it."""
        with self._transaction():
            self._db.execute("UPDATE meta SET value = value + 1 WHERE key='service_epoch'")
            row = self._db.execute("SELECT value FROM meta WHERE key='service_epoch'").fetchone()
            if row is None:
                raise damage_error(f"the store {self.path} has no service epoch")
        self.sync()
        self._epoch = int(row[0])
        return self._epoch

    def load(self) -> tuple[StoredSnapshot | None, list[RecordBatch]]:
        """Return snapshot and log, checked against the seal and what was noted as durable."""
        with _translate_errors(self.path):
            snapshot = self._snapshot()
            rows = self._db.execute(
                "SELECT first_event, CAST(records AS BLOB), head FROM log ORDER BY first_event"
            )
            batches = [
                RecordBatch(first, records.split(b"\n"), head) for first, records, head in rows
            ]
        end = 0 if snapshot is None else snapshot.num_events
        if batches:
            end = batches[-1].first_event + len(batches[-1].records)
        if end < self._num_durable:
            raise StoreFailedError(
                f"the store {self.path} ends after {end} events, and {self._num_durable} were on "
                "the disk: its newest part was lost, and what was trained since would be offered "
                "again. Restore it with its -wal and .durable from a backup, or delete it: the "
                "manifest in a checkpoint rebuilds the service."
            )
        return snapshot, batches

    def _snapshot(self) -> StoredSnapshot | None:
        row = self._db.execute("SELECT num_events, head, document, seal FROM snapshot").fetchone()
        if row is None:
            return None
        num_events, head, document, seal = row
        if seal != seal_of(num_events, head, document):
            raise damage_error(f"the snapshot of the store {self.path} was altered")
        rows = self._db.execute("SELECT dataset, page, states FROM pages")
        pages = {(name, number): states for name, number, states in rows}
        return StoredSnapshot(num_events, head, document, pages)

    def append(self, batch: RecordBatch) -> None:
        """Insert one row, in the same statement that checks the epoch."""
        # JSON escapes line breaks: none stands within a record.
        row = (batch.first_event, b"\n".join(batch.records), batch.head, self._epoch)
        # One statement is a transaction by itself: BEGIN, a look at the epoch and COMMIT would
        # each give the interpreter to another thread and wait for it to come back.
        with _translate_errors(self.path):
            inserted = self._db.execute(_APPEND, row).rowcount
            if inserted != 1:
                self._check_epoch()
        self._num_events = batch.first_event + len(batch.records)

    def sync(self) -> None:
        """Sync the WAL, then note how many events are durable."""
        # Read first: what is appended during the sync may not be durable.
        num_events = self._num_events
        try:
            os.fdatasync(self._wal_fd)
        except OSError as error:
            raise StoreFailedError(
                f"the disk under {self.path} failed to write: {error.strerror}. What was not yet "
                "acknowledged may be lost. Check the disk, then start the service again."
            ) from error
        if num_events > self._num_durable:
            self._num_durable = num_events
            _write_durable(self._durable_fd, num_events)

    def write_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Write changed pages and the document, and delete the rows that they cover."""
        with self._transaction():
            self._check_epoch()
            self._db.executemany(
                "DELETE FROM pages WHERE dataset=?", [(name,) for name in snapshot.cleared]
            )
            rows = ((name, number, page) for (name, number), page in snapshot.pages.items())
            self._db.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?, ?)", rows)
            row = (snapshot.num_events, snapshot.head, snapshot.document, snapshot.seal)
            self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?, ?)", row)
            covered = (snapshot.num_events,)
            self._db.execute("DELETE FROM log WHERE first_event < ?", covered)

    def close(self) -> None:
        """Close the database, then the lock."""
        self._db.close()
        os.close(self._wal_fd)
        os.close(self._durable_fd)
        os.close(self._lock_fd)


def _lock(path: Path) -> int:
    """Hold PATH.lock for the life of the process, and return its descriptor."""
    if path.is_dir():
        raise StoreNameError(
            f"the store {path} is a folder; it must be a file. Add a file's name to --store."
        )
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreNameError(
            f"the store {path} cannot be created: {error.strerror}. Name a file in a writable "
            "folder with --store."
        ) from error
    try:
        # Only the quick answer to a second service on the same host. The service epoch is the real
        # fence, also where file locks do not work (some network file systems).
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only with the lock: until then the file names its holder.
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreTakenError(
            f"the store {path} {TAKEN} (process {holder}); a store has one service. "
            "Stop that one, or name another --store."
        ) from error
    except OSError as error:
        os.close(fd)
        raise StoreNameError(
            f"the file {lock} cannot be locked and written: {error.strerror}. Free space, or name "
            "a --store on a local disk."
        ) from error
    return fd


def _open_durable(path: Path) -> int:
    """Return a descriptor of PATH.durable, which says how many events survive a power cut."""
    # A missing store was deleted to be built anew: what was durable of it no longer counts.
    anew = 0 if path.exists() else os.O_TRUNC
    # SQLite reads a WAL up to the first page that does not fit, and does not say what lay after it.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | anew
    return os.open(path.with_name(path.name + ".durable"), flags, 0o644)


def _write_durable(fd: int, num_events: int) -> None:
    """Note that `num_events` are durable."""
    # Not synced: an older note is true too. A full disk may refuse it: the store goes on without.
    with suppress(OSError):
        os.pwrite(fd, f"{num_events:020} {num_events:020}\n".encode(), 0)


def _read_durable(fd: int) -> int:
    """Return how many events were noted as durable; 0 for a note that is torn or missing."""
    first, _, second = os.pread(fd, 64, 0).decode(errors="replace").partition(" ")
    # Written twice: a torn note has two numbers that differ.
    return int(first) if first == second.strip() and first.isdecimal() else 0


def _open_wal(db: sqlite3.Connection, path: Path) -> int:
    """Return a descriptor of the WAL for `sync`, with the file and its folder entry durable."""
    # SQLite keeps this one file while the store is open. It locks the -shm file, so closing this
    # descriptor releases no lock. The write makes sure that the file exists.
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE meta SET value = value WHERE key='service_epoch'")
    db.execute("COMMIT")
    # A file whose folder entry is lost in a power cut is lost with it.
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)
    return os.open(path.with_name(path.name + "-wal"), os.O_RDWR)


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into StoreErrors that say what to do."""
    try:
        yield
    except OSError as error:  # such as a file system that cannot sync a folder
        raise StoreFailedError(
            f"the store {path} failed: {error.strerror}. Name one on a local disk with --store."
        ) from error
    except (sqlite3.Error, UnicodeError) as error:  # it may quote damaged text
        name = getattr(error, "sqlite_errorname", "") or type(error).__name__
        if name.startswith("SQLITE_FULL"):
            raise StoreFullError(
                f"the disk under {path} is full: the call was not applied. Free space; the "
                "service continues by itself."
            ) from error
        reason = " ".join(str(error).split())  # one line, also where it quotes a damaged schema
        raise StoreFailedError(
            f"the store {path} failed with {name}: {reason}. Check the disk; a file that is no "
            "store of this service needs another --store, a damaged one is rebuilt by deleting it "
            "and restoring a checkpoint."
        ) from error
