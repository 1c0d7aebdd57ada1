"""The support rows behind the task keys, for all processes of one server: any of them may be asked
for a task that another one was given.

A SQLite file in a folder of the server's own, in memory where the system has such a place; it ends
with the server.
"""

import io
import sqlite3
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pyarrow as pa

_BUSY_S = 5.0
_TABLE = """create table if not exists tasks (
    key text primary key, stamp text, expires_s real, used integer, num_bytes integer, rows blob
) without rowid"""


@dataclass(frozen=True)
class Found:
    """A task's rows; `support` is None where the caller has those of this stamp already."""

    support: pa.Table | None
    stamp: str
    expires_s: float


@final
class SharedSupport:
    """Support rows by key, least recently put first to go. Safe to use from several threads."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        """Open the file, or begin it."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Nothing here must outlive the machine: no write waits for the disk.
        self._db = sqlite3.connect(
            file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = off")
        self._db.execute(_TABLE)
        self._db.execute("create index if not exists by_use on tasks (used)")

    def put(self, key: str, support: pa.Table, expires_s: float) -> str:
        """Keep a task's rows for all processes and return the stamp of this put."""
        rows, stamp = _to_bytes(support), uuid.uuid4().hex
        with self._lock:
            self._db.execute("begin immediate")
            try:
                self._db.execute(
                    "insert or replace into tasks values "
                    "(?, ?, ?, (select coalesce(max(used), 0) + 1 from tasks), ?, ?)",
                    (key, stamp, expires_s, len(rows), rows),
                )
                self._make_room()
            finally:
                self._db.execute("commit")
        return stamp

    def get(self, key: str, stamp: str, now_s: float) -> Found | None:
        """Return the task's rows, without them where their stamp is this one; None if there are
        none, or their time is over."""
        with self._lock:
            found = self._db.execute(
                "select stamp, expires_s, case when stamp = ? then null else rows end "
                "from tasks where key = ?",
                (stamp, key),
            ).fetchone()
        if found is None or found[1] <= now_s:
            return None
        support = None if found[2] is None else _from_bytes(found[2])
        return Found(support, found[0], found[1])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _make_room(self) -> None:
        (total,) = self._db.execute("select sum(num_bytes) from tasks").fetchone()
        while total > self._max_bytes:
            oldest = self._db.execute(
                "select key, num_bytes from tasks order by used limit 1"
            ).fetchone()
            self._db.execute("delete from tasks where key = ?", (oldest[0],))
            total -= oldest[1]


def _to_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _from_bytes(content: bytes) -> pa.Table:
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
