"""Requests that wait, and the batches that answer all of them together: computed on the event loop,
as two threads of one interpreter only wait for each other, unless long. Requests that arrive
meanwhile wait in the sockets and go into the next batch, so that batches grow with the load."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import final

from gmeta.serving.server.inference_protocol import InferenceAnswer, InferenceRequest, Outcome
from gmeta.serving.server.request_errors import RequestError, defect_error
from gmeta.serving.server.server_limits import BatchLimits
from gmeta_keys.translate_errors import translate_errors

Run = Callable[[Sequence[InferenceRequest]], list[Outcome]]
# Weight of the rate so far against a new batch's: a change of version or of the machine shows
# after some batches.
_RATE_MEMORY = 0.8
# How long a batch waits for requests whose bytes have begun to arrive.
_UNDER_WAY_S = 0.002


# Compared by identity: two callers may ask for the same, and one of them may leave.
@dataclass(frozen=True, eq=False)
class _WaitingRequest:
    request: InferenceRequest
    future: asyncio.Future[Outcome]
    arrived_s: float = field(default_factory=time.perf_counter)


@final
class Batcher:
    """Answers requests; all calls are made on one event loop."""

    def __init__(
        self, run: Run, limits: BatchLimits, observe: Callable[[str, float], None]
    ) -> None:
        """Answer batches by `run`; `observe` gets queue (seconds), tasks and rows of a batch."""
        self._run = run
        self._limits = limits
        self._observe = observe
        self._waiting: deque[_WaitingRequest] = deque()
        self._under_way = 0  # requests that are being read
        self._busy, self._began_s = False, 0.0
        self._closing = False
        self._has_come = False  # whether a request came since the last look
        self._next_look: asyncio.Handle | None = None
        self._long: asyncio.Future[None] | None = None  # the batch that a thread computes
        self._rows_per_s = 0.0
        self._threads = ThreadPoolExecutor(1, "serve-batches")  # for long batches

    def stop(self) -> None:
        """Take no more requests; what waits is answered as long as the event loop runs."""
        self._closing = True
        self._threads.shutdown(wait=False)

    @property
    def num_waiting(self) -> int:
        """Count the requests that no batch has taken yet."""
        return len(self._waiting)

    @property
    def busy_s(self) -> float:
        """Return for how long the batch under way has been computed; 0 without one."""
        return time.perf_counter() - self._began_s if self._busy else 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note that a request is read in this block: a batch waits for it, but not for long."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if self._waiting:
                self._schedule_look()

    async def answer(self, request: InferenceRequest) -> InferenceAnswer:
        """Return the answer. Raise RequestError: it is wrong, too many wait, or time is up."""
        loop, limits = asyncio.get_running_loop(), self._limits
        if self._closing:
            raise RequestError(503, "the server is shutting down. Call another one")
        if len(self._waiting) >= limits.waiting:
            # Refused at once: a caller that waits in a full queue would time out, and its work be
            # wasted.
            raise self._overload_error()
        ticket = _WaitingRequest(request, loop.create_future())
        self._waiting.append(ticket)
        self._has_come = True
        self._schedule_look()
        try:
            async with asyncio.timeout(limits.timeout_s):
                outcome = await ticket.future
        except TimeoutError:
            raise RequestError(
                504,
                f"the request was not answered within {limits.timeout_s:g} s. Retry, with fewer "
                "rows or fewer requests at once",
            ) from None
        finally:
            # Cancelled by the timeout or by its caller: it may still be queued.
            if ticket.future.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(ticket)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def _overload_error(self) -> RequestError:
        rows = sum(ticket.request.num_rows for ticket in self._waiting)
        # Before the first batch no rate is known.
        wait_s = rows / self._rows_per_s if self._rows_per_s else 1.0
        return RequestError(
            429,
            f"{len(self._waiting)} requests wait; no more are taken. Retry after a pause, or start "
            "more servers",
            retry_after_s=max(1, math.ceil(wait_s)),
        )

    def _schedule_look(self, delay_s: float = 0.0) -> None:
        """Look once, after all that the event loop has to do now, or after `delay_s`."""
        loop = asyncio.get_running_loop()
        if self._next_look is not None:
            # One look at a time; a later request moves it behind what the loop has to do by then.
            self._next_look.cancel()
        call = partial(loop.call_later, delay_s) if delay_s else loop.call_soon
        self._next_look = call(self._begin_if_due)

    def _begin_if_due(self) -> None:
        """Begin a batch, unless more requests are about to come."""
        self._next_look = None
        if self._busy or not self._waiting:
            return
        until_s = self._waiting[0].arrived_s + _UNDER_WAY_S
        left_s = until_s - time.perf_counter() if self._under_way else 0.0
        if len(self._waiting) >= self._limits.tasks:
            self._begin_batch()
        elif self._has_come:
            # Where one request lay in the sockets there may be others. Left out, they would be the
            # next batch, and callers would fall into groups that wait for each other.
            self._has_come = False
            self._schedule_look()
        elif left_s > 0:
            self._schedule_look(left_s)
        else:
            self._begin_batch()

    def _begin_batch(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        began_s = time.perf_counter()
        for ticket in batch:
            self._observe("queue", began_s - ticket.arrived_s)
        requests = [ticket.request for ticket in batch]
        num_rows = sum(request.num_rows for request in requests)
        self._observe("tasks", len(requests))
        self._observe("rows", num_rows)
        self._busy, self._began_s = True, began_s
        # A batch in a thread costs two switches, and lets probes be answered meanwhile.
        likely_s = num_rows / self._rows_per_s if self._rows_per_s else 0.0
        if likely_s <= self._limits.inline_s:
            self._end_batch(batch, self._run_or_halve(requests), began_s, num_rows)
        else:
            # Kept here: the loop has only weak references to its tasks.
            self._long = asyncio.ensure_future(self._run_in_thread(batch, began_s, num_rows))

    async def _run_in_thread(
        self, batch: list[_WaitingRequest], began_s: float, num_rows: int
    ) -> None:
        loop, requests = asyncio.get_running_loop(), [ticket.request for ticket in batch]
        outcomes = await loop.run_in_executor(self._threads, self._run_or_halve, requests)
        self._end_batch(batch, outcomes, began_s, num_rows)

    def _end_batch(
        self, batch: list[_WaitingRequest], outcomes: list[Outcome], began_s: float, num_rows: int
    ) -> None:
        now_s = time.perf_counter()
        # Not 0, which a coarse clock could say: it is divided by.
        spent_s = max(now_s - began_s, 1e-6)
        before = self._rows_per_s or num_rows / spent_s
        self._rows_per_s = _RATE_MEMORY * before + (1 - _RATE_MEMORY) * num_rows / spent_s
        self._busy = False
        for ticket, outcome in zip(batch, outcomes, strict=True):
            if not ticket.future.done():
                ticket.future.set_result(outcome)
        if self._waiting:
            self._schedule_look()

    def _run_or_halve(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        # Halved until the one that fails is alone: log2(n) more batches, and the others are
        # answered.
        half = len(requests) // 2  # 0 where there is nothing to halve
        try:
            # One batch must not end the server, nor one request fail the others; the log reports a
            # defect with the one request that causes it.
            with translate_errors(_isolate_failure if half else defect_error):
                return self._run(requests)
        except RequestError as error:
            if not half:
                return [error]
        # After the block: within it, each traceback would drag those of the larger batches along.
        return self._run_or_halve(requests[:half]) + self._run_or_halve(requests[half:])

    def _next_batch(self) -> list[_WaitingRequest]:
        """Return what waits, as much as one batch may hold."""
        batch: list[_WaitingRequest] = []
        num_rows = 0
        while self._waiting and len(batch) < self._limits.tasks:
            ticket = self._waiting[0]
            if not ticket.future.done():  # else its caller has left in this very turn
                num_rows += ticket.request.num_rows
                # A request of more rows than a batch may have is a batch of its own.
                if batch and num_rows > self._limits.rows:
                    break
                batch.append(ticket)
            self._waiting.popleft()
        return batch


def _isolate_failure(_: Exception) -> RequestError:
    return RequestError(500, "the server failed on the requests of a batch")
