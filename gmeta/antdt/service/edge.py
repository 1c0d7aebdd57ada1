"""The gRPC edge: each RPC becomes a command for the writer's thread and is answered when its group
is committed. Nothing is decided here; the handlers run on the event loop."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, final

import grpc

from gmeta.access.auth import Guard, abort
from gmeta.access.errors import RefusedError
from gmeta.access.log import event
from gmeta.access.rate import RateLimit
from gmeta.antdt.errors import shutdown_refusal
from gmeta.antdt.ledger.checkpoints import find_checkpoint
from gmeta.antdt.ledger.ledger import Ledger
from gmeta.antdt.model import argument_refusal, check_range
from gmeta.antdt.rpc import operator_views as views
from gmeta.antdt.rpc.command_codecs import CODECS, encode_refusal
from gmeta.antdt.rpc.event_loop import wait_for
from gmeta.antdt.rpc.streamed_calls import STREAMED
from gmeta.antdt.service.service_metrics import ServiceMetrics
from gmeta.antdt.service.tickets import ANSWER_TIMEOUT_S, hung_disk_refusal
from gmeta.antdt.storage.ledger_writer import LedgerWriter
from gmeta.antdt.storage.request import LedgerView, Request
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc

MAX_WATCHERS = 8  # for each the whole status is built again and again
MAX_STREAMS = 4096  # one a worker; workers beyond these make single calls
GUARD_LINES_PER_S = 10.0  # of calls refused for their proof, role or rate
# Rare calls, each of which changes who takes part or what is trained. With a line for each Lease
# the log would hold nothing else.
_LOGGED = {"Register", "RegisterDataset", "Restore", "Fail", "PrepareCheckpoint"}
_LOGGED |= {"Requeue", "Skip", "Drain"}
_RPC_OF_FIELD = {field: rpc for rpc, field in STREAMED.items()}


@final
class ShardServicer(pb_grpc.ShardServiceServicer):  # type: ignore[misc]
    """All RPCs of the service."""

    def __init__(
        self, lease_ttl_s: float, report_every_s: float = 0.0, guard: Guard | None = None
    ) -> None:
        """Take what replies contain, and the guard, which intercepts all calls by itself."""
        self._ttl_ms = int(lease_ttl_s * 1000)
        self._report_every_ms = int(report_every_s * 1000)
        # Called here only for each request of a stream, which it cannot intercept.
        self._guard = guard
        self._writer: LedgerWriter | None = None
        self._num_watchers = 0
        self._streams: dict[Any, bool] = {}  # the task of each, and whether it waits for a request
        self._closing = asyncio.Event()
        self._auditing = asyncio.Lock()
        self.metrics = ServiceMetrics(self.read_status, lambda: len(self._streams))
        self._lines_of_guard = RateLimit(GUARD_LINES_PER_S, GUARD_LINES_PER_S)
        if guard is not None:
            guard.on_refused = self._count_refusal

    def open(self, writer: LedgerWriter) -> None:
        """Answer calls from now on: the store has been read."""
        self._writer = writer

    async def close(self) -> None:
        """End the streams, after the answers to their requests under way."""
        # Otherwise a drain would wait for them until its end.
        self._closing.set()
        for task, is_idle in self._streams.items():
            if is_idle:
                task.cancel()

    def ask(self, request: Request) -> Any:
        """Return the request's answer, waiting in a thread that is not the event loop's."""
        return wait_for(self._ask(request))

    async def _ask(self, request: Request) -> Any:
        """Return the request's answer, as `ask` does, on the event loop."""
        if self._writer is None:
            message = "the service is recovering its store; retry in a moment."
            raise RefusedError("UNAVAILABLE", "SHUTTING_DOWN", message)
        future = asyncio.get_running_loop().create_future()
        self._writer.submit(request, future)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise hung_disk_refusal() from None

    def read_status(self) -> Any:
        """Return a StatusResponse, or None while the service cannot answer."""
        try:
            return self.ask(LedgerView(views.status))
        except RefusedError:
            return None

    async def _answer_and_log(
        self, rpc: str, peer: str, respond: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Answer one call, with its metrics and its line in the log. Raise RefusedError."""
        began_s = time.perf_counter()
        code = "OK"
        try:
            return await respond()
        except RefusedError as error:
            code = error.code
            _log_refusal(rpc, error, peer)
            raise
        finally:
            self.metrics.observe_call(rpc, code, time.perf_counter() - began_s)

    def _count_refusal(self, rpc: str, error: RefusedError, peer: str) -> None:
        """Count a call that the guard refused, and log some of them."""
        self.metrics.calls.labels(rpc, error.code).inc()
        if self._lines_of_guard.admit(""):
            _log_refusal(rpc, error, peer)

    async def _answer(self, rpc: str, context: Any, respond: Callable[[], Awaitable[Any]]) -> Any:
        """Answer one call, as `_answer_and_log` does; a refusal becomes its status."""
        try:
            return await self._answer_and_log(rpc, context.peer(), respond)
        except RefusedError as error:
            await abort(context, error)

    def _admission(self, context: Any) -> Callable[[str], None]:
        """Return a function that checks each request of a stream, if there is a guard."""
        return self._guard.admission(context) if self._guard else lambda rpc: None

    async def Status(self, request: Any, context: Any) -> Any:
        """Return datasets, workers and checkpoints as they are now."""
        return await self._answer("Status", context, lambda: self._ask(LedgerView(views.status)))

    async def ListShards(self, request: Any, context: Any) -> Any:
        """Return one page of a dataset's shards, of one state or of all."""

        def view(ledger: Ledger, now_s: float) -> Any:
            r = request
            return views.list_shards(ledger, r.dataset, r.state, r.page_size, r.page_token)

        return await self._answer("ListShards", context, lambda: self._ask(LedgerView(view)))

    async def Audit(self, request: Any, context: Any) -> Any:
        """Return what a prepared checkpoint was trained on, with every unit accounted for."""
        return await self._answer("Audit", context, lambda: self._audit(request.checkpoint_id))

    async def _audit(self, checkpoint_id: str) -> Any:
        """Return the AuditResponse of a prepared checkpoint."""

        def view(ledger: Ledger, now_s: float) -> str:
            return find_checkpoint(ledger.state, checkpoint_id).manifest_json

        # One at a time: each takes several times a manifest's memory. In a thread of its own: the
        # writer only looks the manifest up.
        async with self._auditing:
            return await asyncio.to_thread(views.audit, await self._ask(LedgerView(view)))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the status again and again, as long as the caller may see it."""
        admit = self._admission(context)

        async def look() -> Any:
            admit("Watch")
            return await self._ask(LedgerView(views.status))

        interval_s = await self._answer("Watch", context, lambda: self._begin_watch(request))
        try:
            while not self._closing.is_set():
                status = await self._answer("Watch", context, look)
                yield pb.WatchResponse(status=status)
                try:
                    async with asyncio.timeout(interval_s):
                        await self._closing.wait()
                except TimeoutError:
                    continue
        finally:
            self._num_watchers -= 1

    async def _begin_watch(self, request: Any) -> float:
        interval_ms = request.interval_ms or 1000
        check_range("interval_ms", interval_ms, 200, 60_000)
        if self._num_watchers >= MAX_WATCHERS:
            raise RefusedError(
                "RESOURCE_EXHAUSTED",
                "BUSY",
                f"{MAX_WATCHERS} callers are watching; no more are taken. Use Status, or scrape "
                "/metrics.",
            )
        self._num_watchers += 1
        return float(interval_ms / 1000)

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the answer to each request of a worker's stream, in their order."""
        if len(self._streams) >= MAX_STREAMS:
            message = (
                f"{MAX_STREAMS} streams are open; no more are taken. Make the calls one by one."
            )
            await abort(context, RefusedError("RESOURCE_EXHAUSTED", "LIMIT", message))
        admit = self._admission(context)
        peer, task = context.peer(), asyncio.current_task()
        try:
            while not self._closing.is_set():
                self._streams[task] = True
                request = await context.read()
                self._streams[task] = False
                if request is grpc.aio.EOF:
                    return
                yield await self._answer_streamed(request, peer, admit)
        # `close` cancels streams that wait for a request. Any other cancellation: the caller left.
        except asyncio.CancelledError:
            if not self._closing.is_set():
                raise
        finally:
            self._streams.pop(task, None)
        # With this reason the client asks the successor, instead of taking it for a cut link.
        await abort(context, shutdown_refusal())

    async def _answer_streamed(self, request: Any, peer: str, admit: Callable[[str], None]) -> Any:
        field = request.WhichOneof("call")
        rpc = _RPC_OF_FIELD.get(field, "Stream")

        async def respond() -> Any:
            if field is None:
                raise argument_refusal(
                    "the request names no call that this service knows; allowed are "
                    f"{', '.join(STREAMED)}. Make other calls one by one."
                )
            admit(rpc)
            return await self._respond(rpc, getattr(request, field), peer)

        try:
            answer = {field: await self._answer_and_log(rpc, peer, respond)}
        except RefusedError as error:
            answer = {"refusal": encode_refusal(error)}
        return pb.StreamResponse(call_id=request.call_id, **answer)

    async def _respond(self, rpc: str, request: Any, peer: str) -> Any:
        to_command, to_response = CODECS[rpc]
        command = to_command(request)
        response = to_response(await self._ask(command), self._ttl_ms)
        if rpc == "Register":
            response.report_every_ms = self._report_every_ms
        if rpc in _LOGGED:
            event(logging.INFO, rpc, peer=peer, **_fields(command))
        return response


def _handler(rpc: str) -> Callable[[ShardServicer, Any, Any], Awaitable[Any]]:
    async def handle(self: ShardServicer, request: Any, context: Any) -> Any:
        peer = context.peer()
        return await self._answer(rpc, context, lambda: self._respond(rpc, request, peer))

    handle.__name__ = rpc
    handle.__doc__ = f"Apply {rpc} and return its response once it is durable."
    return handle


def _log_refusal(rpc: str, error: RefusedError, peer: str) -> None:
    event(logging.INFO, "refused", rpc=rpc, reason=error.reason, message=str(error), peer=peer)


def _fields(command: Any) -> dict[str, object]:
    """Return a command's fields for the log, the caller as its name, long texts cut."""
    fields = {k: v for k, v in command._asdict().items() if k != "caller"}
    caller = getattr(command, "caller", None)
    if caller is not None:
        fields["worker_id"] = caller.worker_id
    return {
        key: value if isinstance(value, int) else str(value)[:200] for key, value in fields.items()
    }


# All calls that are commands differ only in their codecs.
for _rpc in CODECS:
    setattr(ShardServicer, _rpc, _handler(_rpc))
