"""The thread that owns the ledger and appends what has queued up as one group, and the syncer: it
makes all groups durable with one fsync, then hands back their answers, while the writer goes on."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

from gmeta.access.errors import RefusedError
from gmeta.access.log import event
from gmeta.antdt.errors import StoreError, shutdown_refusal
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.storage.request import AnsweredRequest, Request, is_early, refusal_of

# For types alone: at run time it would lengthen the longest chain of imports.
if TYPE_CHECKING:
    from gmeta.antdt.storage.committer import Committer

MAX_GROUP = 256  # operations in one transaction; SQLite gains little above 128
# How long a small group waits for more. 1 ms makes larger groups for a few per cent less CPU, but
# lets both cores idle for more than that (benchmarks/antdt_service.py: 5 % fewer RPC/s).
GATHER_S = 0.0002
GATHER_ENOUGH = 32  # a group of this size goes at once
MAX_QUEUED = 16_384  # more requests than this are refused for now
TICK_S = 0.1  # how late an expiry may be noticed without a call


class GroupStats(NamedTuple):
    """One group, for the metrics."""

    num_requests: int
    append_s: float
    expired: tuple[tuple[int, str], ...]  # (token, worker)


@final
class LedgerWriter:
    """Runs a Committer in its own thread."""

    def __init__(
        self,
        committer: "Committer",
        deliver: Callable[[list[AnsweredRequest]], None],
        observe: Callable[[GroupStats], None],
        on_end: Callable[[], None],
    ) -> None:
        """Prepare the threads; `deliver` gets each group's answers."""
        self._committer = committer
        self._deliver = deliver
        self._observe = observe
        # Called once nothing can be served any more: the store was taken over, or the disk failed.
        self._on_end = on_end
        self._queue: deque[tuple[Request, Any]] = deque()
        self._in_hand: list[tuple[Request, Any]] = []  # of the queue, not answered yet
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="antdt-writer", daemon=True)
        # Groups, and whether they need a sync.
        self._unsynced: deque[tuple[list[AnsweredRequest], bool]] = deque()
        self._sync_wake = threading.Event()
        self._written = False
        self._syncer = threading.Thread(target=self._sync, name="antdt-syncer", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()
        self._syncer.start()

    def submit(self, request: Request, ticket: Any) -> None:
        """Queue a request; `deliver` gets its answer and the ticket. Raise RefusedError."""
        if self._stopping:
            raise shutdown_refusal()
        if len(self._queue) >= MAX_QUEUED:
            message = f"{MAX_QUEUED} calls are waiting; no more are taken. Retry after a pause."
            raise RefusedError("RESOURCE_EXHAUSTED", "BUSY", message)
        self._queue.append((request, ticket))
        self._wake.set()

    def stop(self) -> None:
        """Commit what is queued, store a snapshot, end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._syncer.join()

    def _run(self) -> None:
        try:
            while not self._stopping or self._queue:
                if not self._queue:
                    self._wake.wait(TICK_S)
                # Before the queue is read: a request in between must not wait for the tick.
                self._wake.clear()
                if 0 < len(self._queue) < GATHER_ENOUGH and not self._stopping:
                    time.sleep(GATHER_S)
                self._commit_group()
            if self._committer.take_over_error is None:
                self._committer.try_snapshot()
        finally:
            # In this order: the syncer ends when it wakes, finds this set, and nothing left to do.
            self._written = True
            self._sync_wake.set()
            self._end()
            # After a defect some are left: no caller may wait for an answer that cannot come.
            left = [*self._in_hand, *self._queue]
            self._deliver([AnsweredRequest(ticket, shutdown_refusal()) for _, ticket in left])

    def _commit_group(self) -> None:
        size = min(len(self._queue), MAX_GROUP)
        self._in_hand = group = [self._queue.popleft() for _ in range(size)]
        # Also with no request: leases must run out when nobody calls.
        requests: list[Request] = [cmd.Tick(), *(request for request, _ in group)]
        began_s = time.perf_counter()
        appended = self._committer.append(requests)
        ticked, *answers = appended.answers
        expired = ticked.expired if isinstance(ticked, cmd.TickReply) else ()
        self._observe(GroupStats(size, time.perf_counter() - began_s, expired))
        answered = [
            AnsweredRequest(ticket, x) for (_, ticket), x in zip(group, answers, strict=True)
        ]
        # Before the sync, which these answers do not need.
        self._deliver([each for each in answered if is_early(each.answer)])
        late = [each for each in answered if not is_early(each.answer)]
        if late or appended.needs_sync:
            self._unsynced.append((late, appended.needs_sync))
            self._sync_wake.set()
        self._in_hand = []
        if self._committer.take_over_error is not None:
            self._end()

    def _sync(self) -> None:
        """Hand groups out once they are durable."""
        failed: RefusedError | None = None
        try:
            while not self._written or self._unsynced:
                if not self._unsynced:
                    self._sync_wake.wait()
                self._sync_wake.clear()
                groups = [self._unsynced.popleft() for _ in range(len(self._unsynced))]
                if failed is None and any(needs_sync for _, needs_sync in groups):
                    failed = self._try_sync()
                # In the order of the appends: no answer overtakes what it depends on.
                for answered, _ in groups:
                    self._deliver([AnsweredRequest(ticket, failed or x) for ticket, x in answered])
        finally:
            self._end()

    def _try_sync(self) -> RefusedError | None:
        """Sync the store; if that fails, end the service and return the refusal."""
        try:
            self._committer.sync()
        except StoreError as error:
            event(logging.ERROR, "sync_failed", error=str(error))
            # What is on the disk is unknown now: the service's successor reads it.
            self._end()
            return refusal_of(error)
        return None

    def _end(self) -> None:
        """Take no more requests."""
        # Unless `stop` was called: then it is another service's take-over, or a defect.
        if not self._stopping:
            self._stopping = True
            self._on_end()
