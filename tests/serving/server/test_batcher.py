"""Which requests are answered together: all that have come, and those about to."""

import asyncio
import logging
import threading
from collections.abc import Sequence

import pyarrow as pa
import pytest

from gmeta.access.log import LOGGER_NAME
from gmeta.serving.server.batcher import Batcher
from gmeta.serving.server.inference_protocol import InferenceAnswer, InferenceRequest, Outcome
from gmeta.serving.server.request_errors import RequestError
from gmeta.serving.server.request_rows import RequestRows
from gmeta.serving.server.server_limits import BatchLimits

TURNS = 5


class Recorder:
    """Answers batches and keeps how many requests each had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        self.sizes.append(len(requests))
        return [InferenceAnswer("version", {}, 0)] * len(requests)

    def batcher(self, tasks: int = 64) -> Batcher:
        return Batcher(self.run, BatchLimits(tasks=tasks), lambda what, value: None)


def a_request() -> InferenceRequest:
    return InferenceRequest(None, RequestRows.of(pa.table({"item": [1]})))


def test_requests_of_turns_that_follow_each_other_are_one_batch() -> None:
    recorder = Recorder()

    async def work() -> None:
        batcher, answers = recorder.batcher(), []
        for _ in range(TURNS):
            answers.append(asyncio.create_task(batcher.answer(a_request())))
            await asyncio.sleep(0)  # a turn of the loop
        await asyncio.gather(*answers)
        await batcher.answer(a_request())
        batcher.stop()

    asyncio.run(work())
    assert recorder.sizes == [TURNS, 1]


def test_a_batch_is_no_larger_than_the_limit() -> None:
    recorder = Recorder()

    async def work() -> None:
        batcher = recorder.batcher(tasks=3)
        await asyncio.gather(*(batcher.answer(a_request()) for _ in range(8)))
        batcher.stop()

    asyncio.run(work())
    assert recorder.sizes == [3, 3, 2]


def test_a_request_that_is_being_read_is_waited_for_but_not_for_long() -> None:
    recorder = Recorder()

    async def work() -> None:
        batcher = recorder.batcher()
        with batcher.reading():
            first = asyncio.create_task(batcher.answer(a_request()))
            await asyncio.sleep(0)
            second = asyncio.create_task(batcher.answer(a_request()))
        await asyncio.gather(first, second)
        with batcher.reading():  # of a body that does not come
            await batcher.answer(a_request())
        batcher.stop()

    asyncio.run(work())
    assert recorder.sizes == [2, 1]


def test_who_does_not_wait_any_more_keeps_nobody_out() -> None:
    """While a long batch is computed, whoever has left goes: after a timeout, too."""
    released = threading.Event()

    def run(requests: Sequence[InferenceRequest]) -> list[Outcome]:
        assert released.wait(60)
        return [InferenceAnswer("version", {}, 0)] * len(requests)

    async def work() -> None:
        limits = BatchLimits(waiting=2, inline_s=-1.0, timeout_s=600.0)
        batcher = Batcher(run, limits, lambda what, value: None)
        first = asyncio.create_task(batcher.answer(a_request()))
        while not batcher._busy:
            await asyncio.sleep(0)
        others = [asyncio.create_task(batcher.answer(a_request())) for _ in range(2)]
        await asyncio.sleep(0)
        assert batcher.num_waiting == 2
        with pytest.raises(RequestError):
            await batcher.answer(a_request())
        for one in (first, *others):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
        assert batcher.num_waiting == 0
        last = asyncio.create_task(batcher.answer(a_request()))
        await asyncio.sleep(0)
        released.set()
        assert (await last).version == "version"
        batcher.stop()

    asyncio.run(work())


def test_a_request_that_breaks_the_code_fails_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def run(asked: Sequence[InferenceRequest]) -> list[Outcome]:
        sizes.append(len(asked))
        if any(request.request_id == "poison" for request in asked):
            raise MemoryError("too much")
        return [InferenceAnswer(request.request_id, {}, 0) for request in asked]

    async def work() -> list[InferenceAnswer | BaseException]:
        batcher = Batcher(run, BatchLimits(), lambda what, value: None)
        names = ["0", "1", "poison", "3", "4", "5", "6", "7"]
        asked = [
            InferenceRequest(None, RequestRows.of(pa.table({"item": [1]})), request_id=name)
            for name in names
        ]
        answers = (batcher.answer(request) for request in asked)
        found = await asyncio.gather(*answers, return_exceptions=True)
        batcher.stop()
        return found

    monkeypatch.setattr(logging.getLogger(LOGGER_NAME), "propagate", True)
    found = asyncio.run(work())
    failed = found.pop(2)
    assert [one.version for one in found if isinstance(one, InferenceAnswer)] == list("0134567")
    assert isinstance(failed, RequestError)
    assert failed.status == 500
    assert str(failed) == "the server failed on this request; its log says why"
    assert caplog.text.count("MemoryError: too much") == 1
    assert sizes == [8, 4, 2, 2, 1, 1, 4]  # not all of them once more, one by one
