"""Where callers wait for their answers: threads, and futures of the event loop."""

import asyncio
import threading

import pytest

from gmeta.antdt.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.service.tickets import Ticket, deliver, hung_disk, resolve, told
from tests.waiting import PATIENCE_S


def test_a_thread_waits_until_its_own_answer_is_delivered() -> None:
    tickets, seen = [Ticket(), Ticket()], []

    def wait() -> None:
        assert tickets[1].lock.acquire(timeout=PATIENCE_S)
        seen.append(tickets[1].answer)

    waiting = threading.Thread(target=wait)
    waiting.start()
    deliver([(tickets[0], cmd.End(1))])
    assert not tickets[1].lock.acquire(blocking=False)
    deliver([(tickets[1], cmd.End(2))])
    waiting.join(PATIENCE_S)
    assert seen == [cmd.End(2)]


def test_a_caller_that_has_gone_keeps_nobody_from_their_answers() -> None:
    async def answers() -> list[object]:
        loop = asyncio.get_running_loop()
        gone, here = loop.create_future(), loop.create_future()
        gone.cancel()
        resolve([(gone, cmd.End(1)), (here, cmd.End(2))])
        return [gone.cancelled(), await here]

    assert asyncio.run(answers()) == [True, cmd.End(2)]


def test_a_refusal_is_raised_where_it_is_told_and_an_answer_returned() -> None:
    assert told(cmd.End(3)) == cmd.End(3)
    with pytest.raises(RefusedError) as refused:
        told(hung_disk())
    assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "STORE_FAILED")
    assert str(refused.value) == (
        "the store did not commit within 60 s: its disk hangs. Check the disk; the call may or may "
        "not have been applied: retry it unchanged."
    )
