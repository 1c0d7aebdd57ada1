"""The gRPC edge: each RPC becomes a command for the writer thread and blocks until its group is
committed.

Refusals become a status whose trailing metadata names the reason. Nothing is decided here.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import grpc

from gmeta.antdt import views
from gmeta.antdt.committer import Answer, Read, Request
from gmeta.antdt.errors import RefusedError
from gmeta.antdt.ledger import Ledger
from gmeta.antdt.log import event
from gmeta.antdt.metrics import ServiceMetrics
from gmeta.antdt.model import check_range
from gmeta.antdt.wire import CODECS
from gmeta.antdt.writer import Answered, Writer
from protos.antdt.v1 import shard_service_pb2 as pb
from protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc

REASON_KEY = "gmeta-reason"
MAX_WATCHERS = 8  # each holds a thread of the pool
ANSWER_TIMEOUT_S = 60.0  # a commit that takes longer means a hung disk
_LOGGED = {
    "Register",
    "RegisterDataset",
    "Restore",
    "Fail",
    "PrepareCheckpoint",
    "Requeue",
    "Skip",
    "Drain",
}


@final
class Ticket:
    """Where a handler thread waits for its answer: a bare lock, the cheapest hand-over between two
    threads."""

    __slots__ = ("answer", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.answer: Answer = None


def deliver(answered: list[Answered]) -> None:
    """Called by the writer thread after the commit."""
    for ticket, answer in answered:
        ticket.answer = answer
        ticket.lock.release()


@final
class Edge(pb_grpc.ShardServiceServicer):  # type: ignore[misc]
    """All RPCs of the service."""

    def __init__(self, lease_ttl_s: float, report_every_s: float = 0.0) -> None:
        self._ttl_ms = int(lease_ttl_s * 1000)
        self._report_every_ms = int(report_every_s * 1000)
        self._writer: Writer | None = None
        self._watchers = threading.Semaphore(MAX_WATCHERS)
        self._closing = threading.Event()
        self.metrics = ServiceMetrics(self.read_status)

    def open(self, writer: Writer) -> None:
        """Recovery is done: calls are answered from now on."""
        self._writer = writer

    def close(self) -> None:
        """Ends the streams, so that a drain need not wait for them."""
        self._closing.set()

    def ask(self, request: Request) -> Any:
        """Waits for the request's answer. Raises RefusedError."""
        if self._writer is None:
            raise RefusedError(
                "UNAVAILABLE",
                "SHUTTING_DOWN",
                "the service is recovering its store; retry in a moment.",
            )
        ticket = Ticket()
        self._writer.submit(request, ticket)
        if not ticket.lock.acquire(timeout=ANSWER_TIMEOUT_S):
            raise RefusedError(
                "UNAVAILABLE",
                "STORE_FAILED",
                f"the store did not commit within {ANSWER_TIMEOUT_S:.0f} s: its disk hangs. Check "
                "the disk; "
                "the call may or may not have been applied: retry it unchanged.",
            )
        if isinstance(ticket.answer, RefusedError):
            raise ticket.answer
        return ticket.answer

    def read_status(self) -> Any:
        """StatusResponse, or None while the service cannot answer."""
        try:
            return self.ask(Read(views.status))
        except RefusedError:
            return None

    def _answer(self, rpc: str, context: Any, respond: Callable[[], Any]) -> Any:
        """Runs one call with its metrics; a refusal becomes a status."""
        began_s = time.perf_counter()
        code = "OK"
        try:
            return respond()
        except RefusedError as error:
            code = error.code
            event(
                logging.INFO,
                "refused",
                rpc=rpc,
                reason=error.reason,
                message=str(error),
                peer=context.peer(),
            )
            context.set_trailing_metadata(((REASON_KEY, error.reason),))
            context.abort(getattr(grpc.StatusCode, code), str(error))
        finally:
            self.metrics.observe_call(rpc, code, time.perf_counter() - began_s)

    def Status(self, request: Any, context: Any) -> Any:
        """See the proto."""
        return self._answer("Status", context, lambda: self.ask(Read(views.status)))

    def ListShards(self, request: Any, context: Any) -> Any:
        """See the proto."""

        def view(ledger: Ledger, now_s: float) -> Any:
            r = request
            return views.list_shards(ledger, r.dataset, r.state, r.page_size, r.page_token)

        return self._answer("ListShards", context, lambda: self.ask(Read(view)))

    def Audit(self, request: Any, context: Any) -> Any:
        """See the proto."""

        def view(ledger: Ledger, now_s: float) -> Any:
            return views.audit(ledger, request.checkpoint_id)

        return self._answer("Audit", context, lambda: self.ask(Read(view)))

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        """See the proto."""
        interval_s = self._answer("Watch", context, lambda: self._begin_watch(request))
        try:
            while context.is_active() and not self._closing.is_set():
                status = self._answer("Watch", context, lambda: self.ask(Read(views.status)))
                yield pb.WatchResponse(status=status)
                self._closing.wait(interval_s)
        finally:
            self._watchers.release()

    def _begin_watch(self, request: Any) -> float:
        interval_ms = request.interval_ms or 1000
        check_range("interval_ms", interval_ms, 200, 60_000)
        if not self._watchers.acquire(blocking=False):
            raise RefusedError(
                "RESOURCE_EXHAUSTED",
                "BUSY",
                f"{MAX_WATCHERS} callers are watching; no more are taken. Use Status, or scrape "
                "/metrics.",
            )
        return interval_ms / 1000


def _handler(rpc: str) -> Callable[[Edge, Any, Any], Any]:
    to_command, to_response = CODECS[rpc]
    logged = rpc in _LOGGED

    def handle(self: Edge, request: Any, context: Any) -> Any:
        def respond() -> Any:
            command = to_command(request)
            response = to_response(self.ask(command), self._ttl_ms)
            if rpc == "Register":
                response.report_every_ms = self._report_every_ms
            if logged:
                event(logging.INFO, rpc, peer=context.peer(), **_fields(command))
            return response

        return self._answer(rpc, context, respond)

    handle.__name__ = rpc
    handle.__doc__ = "See the proto."
    return handle


def _fields(command: Any) -> dict[str, object]:
    """A command for the log: the caller flattened, long texts cut."""
    fields = {k: v for k, v in command._asdict().items() if k != "caller"}
    caller = getattr(command, "caller", None)
    if caller is not None:
        fields["worker_id"] = caller.worker_id
    return {
        key: value if isinstance(value, int) else str(value)[:200] for key, value in fields.items()
    }


for _rpc in CODECS:
    setattr(Edge, _rpc, _handler(_rpc))
