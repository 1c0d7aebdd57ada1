"""Which requests are answered together: all that have come, and those about to."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from gmeta.server.batcher import Batcher
from gmeta.server.limits import BatchLimits
from gmeta.server.protocol import Answer, Inference, Placed

TURNS = 5
ANSWER = Answer("version", {}, 0)


class Recorder:
    """Answers batches and keeps how many requests each had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, requests: Sequence[Inference]) -> Iterator[list[Placed]]:
        self.sizes.append(len(requests))
        yield [(place, ANSWER) for place in range(len(requests))]

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


@pytest.mark.parametrize("inline_s", [0.1, -1.0], ids=["on the loop", "in a thread"])
def test_the_first_part_of_a_batch_is_answered_before_the_second_is_computed(
    inline_s: float,
) -> None:
    told: list[str] = []
    first_has_come = threading.Event()

    def run(requests: Sequence[Inference]) -> Iterator[list[Placed]]:
        yield [(0, ANSWER)]
        if inline_s < 0:
            first_has_come.wait()  # for ever, if the loop does not go on meanwhile
        told.append("second computed")
        yield [(1, ANSWER)]

    async def ask(batcher: Batcher, name: str) -> None:
        await batcher.answer(a_request())
        told.append(f"{name} answered")
        first_has_come.set()

    async def work() -> None:
        batcher = Batcher(run, BatchLimits(inline_s=inline_s), lambda what, value: None)
        await asyncio.gather(ask(batcher, "first"), ask(batcher, "second"))
        batcher.stop()

    asyncio.run(work())
    assert told == ["first answered", "second computed", "second answered"]


def test_what_fails_after_some_were_answered_fails_for_the_others_alone() -> None:
    def run(requests: Sequence[Inference]) -> Iterator[list[Placed]]:
        yield [(1, ANSWER)]
        raise ZeroDivisionError

    async def work() -> list[Any]:
        batcher = Batcher(run, BatchLimits(), lambda what, value: None)
        answers = (batcher.answer(a_request()) for _ in range(3))
        found = await asyncio.gather(*answers, return_exceptions=True)
        batcher.stop()
        return found

    first, second, third = asyncio.run(work())
    assert second is ANSWER
    assert first is third
    assert (first.status, str(first)) == (
        500, "the server failed on this request; its log says why",
    )  # fmt: skip
