"""The client's side of one stream of calls: any thread calls, the event loop sends and receives."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, final

import grpc

from gmeta.access.errors import REASON_KEY
from gmeta.antdt.rpc.event_loop import event_loop
from gmeta.antdt.rpc.streamed_calls import STREAMED
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

# gRPC's code for a connection that broke at the wrong moment: in a write, or between two frames.
_CUT_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_CUT = "Stream removed"
# A refusal on a stream carries the number of its status code, not its name.
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class CallError(Exception):
    """One attempt at a call failed, with what its status says."""

    def __init__(self, code: grpc.StatusCode, reason: str, details: str, of_stream: bool) -> None:
        super().__init__(details)
        self.code = code
        self.reason = reason  # name of a Reason, "" when the status comes from gRPC itself
        self.details = details
        self.of_stream = of_stream  # the stream failed, not this call alone

    @staticmethod
    def of(error: Any, of_stream: bool = False) -> "CallError":
        """Return the CallError of a grpc.RpcError."""
        # Pairs on purpose: as a mapping, grpcio 1.76 has pairs for keys.
        metadata = dict(iter(error.trailing_metadata() or ()))
        reason = str(metadata.get(REASON_KEY, ""))
        code, details = error.code(), error.details() or ""
        cut = details.startswith(_CUT) or (of_stream and code in _CUT_CODES)
        if cut and not reason:
            code = grpc.StatusCode.UNAVAILABLE
        return CallError(code, reason, details, of_stream)


@final
class CallStream:
    """One open stream; `call` is safe from several threads."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        """Open the stream."""
        # It applies to all calls of the stream: other credentials need another stream.
        self.metadata = metadata
        self._loop = event_loop()
        self._stub = stub
        self._counting = threading.Lock()
        self._last_id = 0
        self._unanswered: dict[int, Future[Any]] = {}
        self._unsent: asyncio.Queue[Any] = asyncio.Queue()
        self._ended: CallError | None = None
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    @property
    def ended(self) -> bool:
        """Return whether the stream can carry nothing more."""
        return self._ended is not None or self._running.done()

    def call(self, rpc: str, request: Any, timeout_s: float) -> Any:
        """Return the response of one RPC of `STREAMED`. Raise CallError."""
        field = STREAMED[rpc]
        with self._counting:
            self._last_id += 1
            call_id = self._last_id
        message, answered = pb.StreamRequest(call_id=call_id, **{field: request}), Future[Any]()
        self._loop.call_soon_threadsafe(self._ask, message, answered)
        try:
            answer = answered.result(timeout_s)
        except TimeoutError:
            # Answers come in order: whatever delays this one delays all behind it.
            self.close()
            raise CallError(
                grpc.StatusCode.DEADLINE_EXCEEDED, "", f"no answer within {timeout_s:g} s", True
            ) from None
        if answer.HasField("refusal"):
            refusal = answer.refusal
            # A newer service may have reasons that this client does not know.
            by_number = pb.Reason.DESCRIPTOR.values_by_number.get(refusal.reason)
            reason = by_number.name.removeprefix("REASON_") if by_number else str(refusal.reason)
            raise CallError(_CODES[refusal.code], reason, refusal.message, False)
        return getattr(answer, field)

    def close(self) -> None:
        """End the stream; what is unanswered fails as UNAVAILABLE."""
        self._running.cancel()

    def _ask(self, message: Any, answered: Future[Any]) -> None:
        # If it was closed before the loop came to it, it never ran, and never reported its end.
        if self._ended is not None or self._running.cancelled():
            answered.set_exception(self._ended or _broken_error())
            return
        self._unanswered[message.call_id] = answered
        self._unsent.put_nowait(message)

    async def _run(self) -> None:
        ended = _broken_error()
        try:
            call = self._stub.Stream(metadata=self.metadata)
            sending = asyncio.create_task(self._send(call))
            try:
                await self._receive(call)
            except grpc.RpcError as error:
                ended = CallError.of(error, of_stream=True)
            finally:
                sending.cancel()
                call.cancel()
        finally:
            # A stream is never mended: when it ends, all that is unanswered fails with its status,
            # and the next call opens another one.
            self._ended = ended
            for answered in self._unanswered.values():
                answered.set_exception(ended)
            self._unanswered.clear()

    async def _receive(self, call: Any) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            self._unanswered.pop(answer.call_id).set_result(answer)

    async def _send(self, call: Any) -> None:
        try:
            while True:
                await call.write(await self._unsent.get())
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # `_receive` gets the same error, and reports it


def _broken_error() -> CallError:
    return CallError(grpc.StatusCode.UNAVAILABLE, "", "the stream of calls broke", True)
