"""The support rows behind the task keys, for all processes of one server: a SQLite file in a folder
of the server's own, which ends with it."""

import io
import logging
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pyarrow as pa

from gmeta.access.log import event
from gmeta.platform.files.storage_errors import translate_storage_errors

NO_ROOM = "Free some of the place, or make it larger (docker run --shm-size)"
_BUSY_S = 5.0
_TABLE = """create table if not exists tasks (
    key text primary key, stamp text, expires_s real, used integer, num_bytes integer, rows blob
) without rowid"""


@dataclass(frozen=True)
class SharedRows:
    """A task's rows; `support` is None where the caller has those of this stamp already."""

    support: pa.Table | None
    stamp: str
    expires_s: float
    events: pa.Table | None = None


@final
class SharedSupport:
    """Support rows by key, least recently put first to go. Safe to use from several threads."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        """Open the file, or begin it. Raise GMetaError where its place is full."""
        # What SQLite writes before a change needs room beside the rows.
        total = shutil.disk_usage(file.parent).total or 2 * max_bytes  # 0: it has no bounds
        self._max_bytes = min(max_bytes, total // 2)
        self.num_failed = 0  # calls that failed
        self._is_failing = False
        self._lock = threading.Lock()
        # Nothing here must outlive the machine: no write waits for the disk.
        # No isolation level: `_transaction` begins and ends each by itself.
        self._db = sqlite3.connect(
            file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        with translate_storage_errors(f"cannot keep tasks in {file}", NO_ROOM):
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = off")
            self._db.execute(_TABLE)
            self._db.execute("create index if not exists by_use on tasks (used)")
            # Added up anew, the bytes of all tasks would take milliseconds with each put.
            self._db.execute(
                "create table if not exists total (one integer primary key, num_bytes)"
            )
            self._db.execute("insert or ignore into total values (1, 0)")

    def put(
        self, key: str, support: pa.Table, expires_s: float, events: pa.Table | None = None
    ) -> str:
        """Keep a task's rows for all processes; return the stamp of this put, "" if it failed."""
        sink = io.BytesIO()
        for table in [support] if events is None else [support, events]:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        rows, stamp = sink.getvalue(), uuid.uuid4().hex
        with self._lock:
            try:
                if len(rows) > self._max_bytes:  # its older rows go, and nobody else's
                    with self._transaction():
                        self._drop(key)
                    return ""
                try:
                    self._insert(key, stamp, expires_s, rows)
                except sqlite3.Error as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                        raise
                    # Others may have filled the place: half of what is kept makes room.
                    with self._transaction():
                        self._drop(key)
                        self._make_room(self._total_bytes() // 2)
                    self._insert(key, stamp, expires_s, rows)
            except sqlite3.Error as error:
                self._note_failure(error)
                return ""
            self._is_failing = False
        return stamp

    def get(self, key: str, stamp: str, now_s: float) -> SharedRows | None:
        """Return the task's rows, without them where their stamp is this one, or None."""
        with self._lock:
            try:
                shared_rows = self._db.execute(
                    # Rows that the caller has already are not read again.
                    "select stamp, expires_s, case when stamp = ? then null else rows end "
                    "from tasks where key = ?",
                    (stamp, key),
                ).fetchone()
            except sqlite3.Error as error:
                self._note_failure(error)
                return None
        # Expired rows go with the oldest: removing them here would make each get a write.
        if shared_rows is None or shared_rows[1] <= now_s:
            return None
        stamp, expires_s, rows = shared_rows
        if rows is None:
            return SharedRows(None, stamp, expires_s)
        source = pa.BufferReader(rows)
        support, events = pa.ipc.open_stream(source).read_all(), None
        if source.tell() < len(rows):
            events = pa.ipc.open_stream(source).read_all()
        return SharedRows(support, stamp, expires_s, events)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # Immediate: a reader that turns writer could find the file changed, and fail midway.
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        finally:
            # After some errors SQLite has rolled back by itself.
            if self._db.in_transaction:
                self._db.execute("rollback")

    def _insert(self, key: str, stamp: str, expires_s: float, rows: bytes) -> None:
        with self._transaction():
            self._drop(key)
            self._db.execute(
                "insert into tasks values "
                "(?, ?, ?, (select coalesce(max(used), 0) + 1 from tasks), ?, ?)",
                (key, stamp, expires_s, len(rows), rows),
            )
            self._db.execute("update total set num_bytes = num_bytes + ?", (len(rows),))
            self._make_room(self._max_bytes)

    def _note_failure(self, error: sqlite3.Error) -> None:
        self.num_failed += 1
        if not self._is_failing:
            event(logging.ERROR, "tasks_not_shared", message=str(error))
        self._is_failing = True

    def _total_bytes(self) -> int:
        (total,) = self._db.execute("select num_bytes from total").fetchone()
        return int(total)

    def _make_room(self, most: int) -> None:
        while self._total_bytes() > most:
            (oldest,) = self._db.execute("select key from tasks order by used limit 1").fetchone()
            self._drop(oldest)

    def _drop(self, key: str) -> None:
        self._db.execute(
            "update total set num_bytes = num_bytes - "
            "coalesce((select num_bytes from tasks where key = ?), 0)",
            (key,),
        )
        self._db.execute("delete from tasks where key = ?", (key,))
