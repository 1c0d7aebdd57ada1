"""Adapted tasks by their keys: the least recently used go first, and all go after their time. An
entry keeps the support rows too: with a newer version a task adapts anew, unseen by callers."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import pyarrow as pa

from gmeta.serving.server.shared_support import SharedSupport
from gmeta.serving.task_states import TaskState

_ENTRY_BYTES = 1_000  # of an entry's own objects, about


@dataclass(frozen=True)
class CachedTask:
    """One task; each put of a key has a `stamp` of its own."""

    support: pa.Table
    state: TaskState | None
    version: str  # that made the state
    stamp: str
    expires_s: float
    events: pa.Table | None = None  # beside the support rows

    @property
    def num_bytes(self) -> int:
        """Return about how many bytes it takes."""
        state = self.state.num_bytes if self.state is not None else 0
        events = self.events.nbytes if self.events is not None else 0
        return _ENTRY_BYTES + int(self.support.nbytes + events) + state


@final
class TaskCache:
    """The tasks of one process, and what others of the server share. Safe for several threads."""

    def __init__(
        self,
        max_bytes: int,
        ttl_s: float,
        shared: SharedSupport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # The clock is one for all processes of a machine and is never set: by the time of day, set
        # back, later rows would count as the older ones.
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._shared = shared
        self._clock = clock
        self._entries: OrderedDict[str, CachedTask] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_unshared(self) -> int:
        """Count the failed calls to the store that all processes share."""
        return self._shared.num_failed if self._shared is not None else 0

    def get(self, key: str) -> CachedTask | None:
        """Return the task of this key, or None; only a put renews its time."""
        now_s = self._clock()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.expires_s <= now_s:
                self._drop(key)
                entry = None
            if entry is not None:
                self._entries.move_to_end(key)
        if self._shared is None:
            return entry
        # Another process may have been given newer rows.
        shared_rows = self._shared.get(key, entry.stamp if entry is not None else "", now_s)
        if shared_rows is None:
            # A task that never got there is this process's own.
            return entry if entry is not None and not entry.stamp else None
        # The store has the rows that this process has already, or older ones.
        if shared_rows.support is None or (
            entry is not None and shared_rows.expires_s < entry.expires_s
        ):
            return entry
        stamp, expires_s, events = shared_rows.stamp, shared_rows.expires_s, shared_rows.events
        return CachedTask(shared_rows.support, None, "", stamp, expires_s, events)

    def put(
        self,
        key: str,
        support: pa.Table,
        state: TaskState,
        version: str,
        events: pa.Table | None = None,
    ) -> bool:
        """Keep a task whose rows a caller sent; return whether there is room for it."""
        expires_s, stamp = self._clock() + self._ttl_s, ""
        if self._shared is not None:
            stamp = self._shared.put(key, support, expires_s, events)
        entry = CachedTask(support, state, version, stamp, expires_s, events)
        return self._insert(key, entry) or bool(stamp)

    def restore(self, key: str, entry: CachedTask, state: TaskState, version: str) -> None:
        """Keep the state that a newer version, or this process, made of kept support rows."""
        held = self._entries.get(key)
        if held is None or held.expires_s <= entry.expires_s:  # else newer rows came meanwhile
            self._insert(key, replace(entry, state=state, version=version))

    def forget_states(self, version: str) -> None:
        """Let go of the states that other versions made; the support rows stay."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                if entry.version != version and entry.state is not None:
                    self.num_bytes -= entry.state.num_bytes
                    self._entries[key] = replace(entry, state=None)

    def _insert(self, key: str, entry: CachedTask) -> bool:
        with self._lock:
            self._drop(key)
            # Room for it would cost all others.
            if entry.num_bytes > self._max_bytes:
                return False
            self._entries[key] = entry
            self.num_bytes += entry.num_bytes
            # What was just put is the last one, so it stays.
            while self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))
            return True

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
