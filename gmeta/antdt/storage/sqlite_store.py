"""The default store: one SQLite file in WAL mode, whose commits share an fsync."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

from gmeta.antdt.errors import (
    StoreFailedError,
    StoreFullError,
    StoreNameError,
    StoreTakenError,
    StoreVersionError,
)
from gmeta.antdt.storage.store import Store, check_epoch
from gmeta.antdt.storage.stored import Batch, Snapshot

STORE_VERSION = 2  # 2: second leases of a shard; a store of version 1 has none
TAKEN = "is held by another service"  # also read from the log of a service that could not start

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE log (first_event INTEGER PRIMARY KEY, records BLOB NOT NULL, head BLOB NOT NULL);
CREATE TABLE pages (
    dataset TEXT, page INTEGER, states BLOB NOT NULL, PRIMARY KEY (dataset, page)
) WITHOUT ROWID;
CREATE TABLE snapshot (
    id INTEGER PRIMARY KEY CHECK (id = 1), num_events INTEGER, head BLOB, document TEXT
);
INSERT INTO meta VALUES ('service_epoch', 0);
"""
# Nothing is inserted when another service has counted the epoch up.
_APPEND = """
INSERT INTO log SELECT ?, ?, ? FROM meta WHERE key = 'service_epoch' AND value = ?
"""


@final
class SqliteStore(Store):
    """One SQLite file; a batch survives the process after `append`, a power cut after `sync`."""

    def __init__(self, path: Path) -> None:
        """Creates or opens the file. Raises a StoreError of the kind that fits."""
        self.path = path
        self._epoch = 0
        with ExitStack() as undo:
            self._lock_fd = _lock(path)
            undo.callback(os.close, self._lock_fd)
            with _translated(path):
                # Transactions are begun by hand; the writer's thread is another than the one that
                # opens.
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
            # What version 1 wrote is read as it is; from now on only this version understands all.
            schema = "" if version else _SCHEMA
            self._db.executescript(f"BEGIN;{schema}PRAGMA user_version={STORE_VERSION};COMMIT;")
        self._wal_fd = _open_wal(self._db, self.path)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _translated(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                # After some errors (a full disk) SQLite has rolled back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _check_epoch(self) -> None:
        found = self._db.execute("SELECT value FROM meta WHERE key='service_epoch'").fetchone()[0]
        check_epoch(str(self.path), found, self._epoch)

    def claim(self) -> int:
        """See Store.claim."""
        with self._transaction():
            self._db.execute("UPDATE meta SET value = value + 1 WHERE key='service_epoch'")
            epoch = self._db.execute("SELECT value FROM meta WHERE key='service_epoch'").fetchone()[
                0
            ]
        self.sync()
        self._epoch = int(epoch)
        return self._epoch

    def load(self) -> tuple[Snapshot | None, list[Batch]]:
        """See Store.load."""
        with _translated(self.path):
            row = self._db.execute("SELECT num_events, head, document FROM snapshot").fetchone()
            pages = {
                (d, n): states
                for d, n, states in self._db.execute("SELECT dataset, page, states FROM pages")
            }
            snapshot = None if row is None else Snapshot(row[0], row[1], row[2], pages)
            return snapshot, list(self._batches(0 if snapshot is None else snapshot.num_events))

    def append(self, batch: Batch) -> None:
        """See Store.append."""
        # JSON escapes line breaks: none stands within a record.
        row = (batch.first_event, b"\n".join(batch.records), batch.head, self._epoch)
        # One statement is a transaction by itself: BEGIN, a look at the epoch and COMMIT would
        # each give the interpreter to another thread and wait for it to come back.
        with _translated(self.path):
            inserted = self._db.execute(_APPEND, row).rowcount
            if inserted != 1:
                self._check_epoch()

    def sync(self) -> None:
        """See Store.sync."""
        try:
            os.fdatasync(self._wal_fd)
        except OSError as error:
            raise StoreFailedError(
                f"the disk under {self.path} failed to write: {error.strerror}. What was not yet "
                "acknowledged may be lost. Check the disk, then start the service again."
            ) from error

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """See Store.write_snapshot."""
        with self._transaction():
            self._check_epoch()
            self._db.executemany(
                "DELETE FROM pages WHERE dataset=?", [(name,) for name in snapshot.cleared]
            )
            rows = ((name, number, page) for (name, number), page in snapshot.pages.items())
            self._db.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?, ?)", rows)
            row = (snapshot.num_events, snapshot.head, snapshot.document)
            self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?)", row)

    def read_log(self) -> Iterator[Batch]:
        """See Store.read_log."""
        with _translated(self.path):
            yield from self._batches(0)

    def _batches(self, first_event: int) -> Iterator[Batch]:
        query = (
            "SELECT first_event, records, head FROM log WHERE first_event >= ? ORDER BY first_event"
        )
        for first, records, head in self._db.execute(query, (first_event,)):
            yield Batch(first, records.split(b"\n"), head)

    def close(self) -> None:
        """See Store.close."""
        self._db.close()
        os.close(self._wal_fd)
        os.close(self._lock_fd)


def _lock(path: Path) -> int:
    """Holds PATH.lock for the life of the process: the quick answer to a second service on the
    same host.

    The service epoch is the real fence; it also holds where file locks do not (some network file
    systems).
    """
    lock = path.with_name(path.name + ".lock")
    if path.is_dir():
        raise StoreNameError(
            f"the store {path} is a folder; it must be a file. Add a file's name to --store."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreNameError(
            f"the store {path} cannot be created: {error.strerror}. Name a file in a writable "
            "folder with --store."
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreTakenError(
            f"the store {path} {TAKEN} (process {holder}); a store has one service. "
            "Stop that one, or name another --store."
        ) from error
    # Only once the lock is had: until then the file names who holds it.
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _open_wal(db: sqlite3.Connection, path: Path) -> int:
    """A descriptor of the WAL for `sync`, with the file and its folder entry durable.

    SQLite keeps the one file while the store is open; it locks the -shm file, so this descriptor
    can be closed without giving any lock away.
    """
    db.execute("BEGIN IMMEDIATE")  # makes sure that the file exists
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
def _translated(path: Path) -> Iterator[None]:
    """SQLite's errors as StoreErrors that say what to do."""
    try:
        yield
    except OSError as error:  # such as a file system that cannot sync a folder
        raise StoreFailedError(
            f"the store {path} failed: {error.strerror}. Name one on a local disk with --store."
        ) from error
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or type(error).__name__
        if name.startswith("SQLITE_FULL"):
            raise StoreFullError(
                f"the disk under {path} is full: the call was not applied. Free space; the "
                "service continues by itself."
            ) from error
        raise StoreFailedError(
            f"the store {path} failed with {name}: {error}. Check the disk; a file that is no "
            "store of this service needs another --store, a damaged one is rebuilt by deleting it "
            "and restoring a checkpoint."
        ) from error
