"""A worker's agent against a real service: actions once each, however often they come."""

import time
from collections.abc import Iterator

import pytest

from gmeta.antdt.client.agent import WorkerAgent
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.model import DatasetSpec
from gmeta.antdt.reports import MonitorConfig, Report
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.antdt.storage.request import LedgerView
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from tests.support.waiting import wait_until

WINDOW_S = 0.05


@pytest.fixture
def server() -> Iterator[ShardServer]:
    config = StragglerConfig(MonitorConfig(window_s=WINDOW_S))
    server = ShardServer(ServiceConfig("127.0.0.1:0", stragglers=config))
    yield server
    server.stop(0.0)


@pytest.fixture
def client(server: ShardServer) -> Iterator[ShardClient]:
    with ShardClient(server.address, "rank0") as client:
        client.register_dataset(DatasetSpec("d", 100, 10))
        yield client


def post(server: ShardServer, number: int, kind: int, worker: str = "", **parameters: float) -> str:
    action_id = f"1.1.{number}"
    server.edge.ask(cmd.PostAction(worker, action_id, kind, 0, parameters))
    return action_id


def taken(agent: WorkerAgent) -> WorkerAgent:
    agent.take_actions()
    return agent


def test_totals_reach_the_monitor(server: ShardServer, client: ShardClient) -> None:
    agent = WorkerAgent(client, 8, lambda: "")
    for _ in range(3):
        agent.count_step(8, 40.0, 2.0, 1.0, 5.0)
    wait_until(lambda: server.edge.read_status().workers[0].report.step == 3)
    report = server.edge.read_status().workers[0].report
    assert (report.tasks_done, report.share, report.compute_ms) == (24, 8, 120.0)
    assert agent.totals == Report(3, 24, 120.0, 6.0, 3.0, 15.0)


def test_a_worker_that_became_slow_or_fast_says_so_once(client: ShardClient) -> None:
    agent = WorkerAgent(client, 8, lambda: "")
    steps_ms = [300.0] * 4 + [900.0] * 2 + [400.0] * 2 + [10.0] * 60
    said = [agent.count_step(8, ms, 0.0, 0.0, 0.0) for ms in steps_ms]
    assert [step for step, changed in enumerate(said) if changed] == [4, 7, 57]


def test_a_hurried_report_is_there_at_once_and_the_answer_soon_after(
    server: ShardServer, client: ShardClient
) -> None:
    client._session.report_every_s = 60.0
    agent = WorkerAgent(client, 8, lambda: "")
    agent.count_step(8, 1.0, 0.0, 0.0, 0.0)
    client.hurry()
    wait_until(lambda: server.edge.read_status().workers[0].report.step == 1)
    post(server, 1, 2, rank0=5.0)
    wait_until(lambda: taken(agent).newest.tasks == 5)


def test_a_plan_waits_until_it_is_adopted(server: ShardServer, client: ShardClient) -> None:
    agent = WorkerAgent(client, 8, lambda: "")
    post(server, 1, 2, rank0=5.0, rank1=11.0, **{"micro:rank0": 2.0})
    wait_until(lambda: taken(agent).newest.version > 0)
    assert (agent.plan.tasks, agent.newest.tasks, agent.newest.micro_batches) == (8, 5, 2)
    agent.adopt(agent.newest)
    assert agent.plan.tasks == 5
    agent.count_step(5, 1.0, 0.0, 0.0, 0.0)
    wait_until(lambda: server.edge.read_status().workers[0].report.share == 5)


def test_a_plan_may_be_adopted_after_a_newer_one(server: ShardServer, client: ShardClient) -> None:
    agent = WorkerAgent(client, 8, lambda: "")
    post(server, 1, 2, rank0=5.0)
    wait_until(lambda: taken(agent).newest.tasks == 5)
    agreed = agent.newest
    post(server, 2, 2, rank0=6.0)
    agent.adopt(agreed)
    assert agent.plan.tasks == 5
    wait_until(lambda: taken(agent).newest.tasks == 6)


def test_an_older_plan_never_replaces_a_newer_one(server: ShardServer, client: ShardClient) -> None:
    agent = WorkerAgent(client, 8, lambda: "")
    post(server, 7, 2, rank0=5.0)
    wait_until(lambda: taken(agent).newest.tasks == 5)
    post(server, 6, 2, rank0=6.0)
    time.sleep(4 * WINDOW_S)
    assert taken(agent).newest.tasks == 5


def test_a_restart_is_asked_for_once_and_answered(server: ShardServer, client: ShardClient) -> None:
    asked: list[str] = []

    def restart() -> str:
        asked.append("restart")
        return ""

    agent = WorkerAgent(client, 8, restart)
    post(server, 1, 5, "rank0")
    wait_until(lambda: bool(taken(agent) and asked))
    time.sleep(4 * WINDOW_S)
    agent.take_actions()
    assert asked == ["restart"]
    wait_until(lambda: not server.edge.ask(_open_actions()))


def test_a_trainer_that_cannot_restart_says_why(server: ShardServer, client: ShardClient) -> None:
    agent = WorkerAgent(client, 8, lambda: "no restarts left")
    action_id = post(server, 1, 5, "rank0")
    wait_until(lambda: taken(agent) is not None and _result_of(server, action_id) == 2)


def _open_actions() -> LedgerView:
    return LedgerView(lambda ledger, now_s: list(ledger.state.actions))


def _result_of(server: ShardServer, action_id: str) -> int:
    found: int = server.edge.ask(LedgerView(lambda ledger, _: ledger.state.acked.get(action_id, 0)))
    return found
