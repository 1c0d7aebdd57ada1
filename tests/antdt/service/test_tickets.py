"""Where callers wait for their answers: futures of the event loop."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.rpc.event_loop import event_loop, wait_for
from gmeta.antdt.service import edge as edge_module
from gmeta.antdt.service.edge import ShardServicer
from gmeta.antdt.service.tickets import deliver, hung_disk_refusal, resolve
from gmeta.antdt.storage.ledger_writer import LedgerWriter
from gmeta.antdt.storage.request import AnsweredRequest
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S


def test_each_caller_gets_its_own_answer_when_that_is_delivered() -> None:
    async def future() -> asyncio.Future[object]:
        return asyncio.get_running_loop().create_future()

    async def answer_of(ticket: asyncio.Future[object]) -> object:
        return await ticket

    tickets = [wait_for(future()), wait_for(future())]
    second = asyncio.run_coroutine_threadsafe(answer_of(tickets[1]), event_loop())
    deliver([AnsweredRequest(tickets[0], cmd.End(1))])
    assert wait_for(answer_of(tickets[0])) == cmd.End(1)
    assert not second.done()
    deliver([AnsweredRequest(tickets[1], cmd.End(2))])
    assert second.result(PATIENCE_S) == cmd.End(2)


def test_a_caller_that_has_gone_keeps_nobody_from_their_answers() -> None:
    async def answers() -> list[object]:
        loop = asyncio.get_running_loop()
        gone, here = loop.create_future(), loop.create_future()
        gone.cancel()
        resolve([(gone, cmd.End(1)), (here, cmd.End(2))])
        return [gone.cancelled(), await here]

    assert asyncio.run(answers()) == [True, cmd.End(2)]


def test_a_refusal_is_raised_where_it_is_waited_for() -> None:
    async def answer() -> object:
        future = asyncio.get_running_loop().create_future()
        resolve([(future, hung_disk_refusal())])
        return await future

    with pytest.raises(RefusedError) as refused:
        asyncio.run(answer())
    assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "STORE_FAILED")
    assert str(refused.value) == (
        "the store did not commit within 60 s: its disk hangs. Check the disk; the call may or may "
        "not have been applied: retry it unchanged."
    )


def test_a_disk_that_hangs_keeps_nobody_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_module, "ANSWER_TIMEOUT_S", 0.01)
    edge = ShardServicer(lease_ttl_s=30.0)
    edge.open(cast(LedgerWriter, SimpleNamespace(submit=lambda request, ticket: None)))
    assert catch_message(RefusedError, edge.ask, cmd.Tick()) == str(hung_disk_refusal())
