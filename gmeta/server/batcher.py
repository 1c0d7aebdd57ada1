"""Requests that wait, and the one thread that answers all of them together as soon as the batch
before is done: no request waits for a timer, and the busier the server, the larger its batches.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from gmeta.antdt.log import LOGGER_NAME
from gmeta.server.errors import RequestError
from gmeta.server.limits import BatchLimits
from gmeta.server.protocol import Answer, Inference, Outcome

Run = Callable[[Sequence[Inference]], list[Outcome]]
_RATE_MEMORY = 0.9  # of the rows a second, from batch to batch


@dataclass(frozen=True)
class _Ticket:
    """A request that waits; its future belongs to the event loop."""

    request: Inference
    future: asyncio.Future[Outcome]
    due_s: float
    arrived_s: float = field(default_factory=time.perf_counter)


@final
class Batcher:
    """Answers requests from an event loop in a thread of its own, from `start` to `stop`."""

    def __init__(
        self,
        run: Run,
        limits: BatchLimits,
        observe: Callable[[str, float], None],
    ) -> None:
        """`run` answers a batch; `observe` is told of what it measures: queue (seconds), tasks and
        rows of a batch."""
        self._run = run
        self._limits = limits
        self._observe = observe
        self._waiting: deque[_Ticket] = deque()
        self._filled = threading.Condition()
        self._closing = False
        self._rows_per_s = 0.0
        self._thread = threading.Thread(target=self._answer_batches, name="serve-batches")
        self._thread.daemon = True

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Answer what waits, then end."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Count the requests that no batch has taken yet."""
        return len(self._waiting)

    async def answer(self, request: Inference) -> Answer:
        """Return the answer to a request. Raise RequestError: it is wrong, too many wait, or it
        took too long.
        """
        loop, limits = asyncio.get_running_loop(), self._limits
        ticket = _Ticket(request, loop.create_future(), loop.time() + limits.timeout_s)
        with self._filled:
            if self._closing:
                raise RequestError(503, "the server is shutting down. Call another one")
            if len(self._waiting) >= limits.waiting:
                raise self._too_many()
            self._waiting.append(ticket)
            self._filled.notify()
        try:
            async with asyncio.timeout_at(ticket.due_s):
                outcome = await ticket.future
        except TimeoutError:
            raise RequestError(
                504,
                f"the request was not answered within {limits.timeout_s:g} s. Retry, with fewer "
                "rows or fewer requests at once",
            ) from None
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def _too_many(self) -> RequestError:
        rows = sum(ticket.request.num_rows for ticket in self._waiting)
        wait_s = rows / self._rows_per_s if self._rows_per_s else 1.0
        return RequestError(
            429,
            f"{len(self._waiting)} requests wait; no more are taken. Retry after a pause, or start "
            "more servers",
            retry_after_s=max(1, math.ceil(wait_s)),
        )

    def _answer_batches(self) -> None:
        while batch := self._next_batch():
            began_s = time.perf_counter()
            for ticket in batch:
                self._observe("queue", began_s - ticket.arrived_s)
            requests = [ticket.request for ticket in batch]
            num_rows = sum(request.num_rows for request in requests)
            self._observe("tasks", len(requests))
            self._observe("rows", num_rows)
            outcomes = self._outcomes(requests)
            rate = num_rows / max(time.perf_counter() - began_s, 1e-6)
            before = self._rows_per_s or rate
            self._rows_per_s = _RATE_MEMORY * before + (1 - _RATE_MEMORY) * rate
            loop = batch[0].future.get_loop()
            loop.call_soon_threadsafe(_resolve, batch, outcomes)

    def _outcomes(self, requests: Sequence[Inference]) -> list[Outcome]:
        try:
            return self._run(requests)
        except Exception as error:  # one batch must not end the server
            logging.getLogger(LOGGER_NAME).error("batch_failed", exc_info=error)
            failed = RequestError(500, "the server failed on this request; its log says why")
            return [failed] * len(requests)

    def _next_batch(self) -> list[_Ticket]:
        """Return what waits, as much as one batch may hold; nothing when all is answered and the
        server ends."""
        batch: list[_Ticket] = []
        with self._filled:
            while not batch:
                while not self._waiting and not self._closing:
                    self._filled.wait()
                if not self._waiting:
                    return []
                num_rows = 0
                while self._waiting and len(batch) < self._limits.tasks:
                    num_rows += self._waiting[0].request.num_rows
                    if batch and num_rows > self._limits.rows:
                        break
                    ticket = self._waiting.popleft()
                    # Its caller has left, or was told that it took too long.
                    if not ticket.future.done():
                        batch.append(ticket)
        return batch


def _resolve(batch: Sequence[_Ticket], outcomes: Sequence[Outcome]) -> None:
    """Hand out the answers, on the event loop."""
    for ticket, outcome in zip(batch, outcomes, strict=True):
        if not ticket.future.done():
            ticket.future.set_result(outcome)
