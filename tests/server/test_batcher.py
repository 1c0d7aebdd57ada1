"""Which requests are answered together: all that have come, and those about to."""

import asyncio
from collections.abc import Sequence

import pyarrow as pa

from gmeta.server.batcher import Batcher
from gmeta.server.limits import BatchLimits
from gmeta.server.protocol import Answer, Inference, Outcome

TURNS = 5


class Recorder:
    """Answers batches and keeps how many requests each had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, requests: Sequence[Inference]) -> list[Outcome]:
        self.sizes.append(len(requests))
        return [Answer("version", {}, 0)] * len(requests)

    def batcher(self, tasks: int = 64) -> Batcher:
        return Batcher(self.run, BatchLimits(tasks=tasks), lambda what, value: None)


def a_request() -> Inference:
    return Inference(None, pa.table({"item": [1]}))


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
