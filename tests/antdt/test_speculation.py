"""Second leases end to end: a real service and processes; examples/score_shards.py is the job."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gmeta.antdt import DatasetSpec, LeaseLostError, ShardClient
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from gmeta.cli.commands.shards import shards
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
SPEC = DatasetSpec("rows", 1200, 20, speculative=True)  # as in the example
SLOW_MS = 2000.0  # a row; forty seconds a shard, the whole job takes the others one
WATCHED = StragglerConfig(
    MonitorConfig(window_s=0.2), ControllerConfig(policy="nd", synchronous=False)
)


@pytest.fixture
def server() -> Iterator[ShardServer]:
    made = ShardServer(ServiceConfig("127.0.0.1:0", stragglers=WATCHED))
    yield made
    made.stop(0.0)


@pytest.fixture
def workers(server: ShardServer) -> Iterator[tuple[ShardClient, ShardClient]]:
    """Two of a dataset of one speculative shard."""
    with ShardClient(server.address, "slow") as slow, ShardClient(server.address, "fast") as fast:
        slow.register_dataset(DatasetSpec("d", 4, 4, speculative=True))
        yield slow, fast


def scorer(server: ShardServer, folder: Path, name: str, *row_ms: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "examples/score_shards.py"), server.address, str(folder)]
    return subprocess.Popen([*command, name, *row_ms], stdout=subprocess.PIPE, text=True)


def until_holding(server: ShardServer, worker_id: str) -> None:
    wait_until(
        lambda: any(
            worker.worker_id == worker_id and worker.num_leases
            for worker in server.edge.read_status().workers
        ),
        f"a lease of {worker_id}",
    )


def test_an_idle_worker_finishes_a_slow_ones_shard(server: ShardServer, tmp_path: Path) -> None:
    with scorer(server, tmp_path, "slow", str(SLOW_MS)) as slow:
        until_holding(server, "slow")
        with scorer(server, tmp_path, "fast0") as one, scorer(server, tmp_path, "fast1") as two:
            said = [process.communicate(timeout=PATIENCE_S)[0] for process in (slow, one, two)]
    assert said[0] == "slow: 0 shards counted, 1 discarded\n"
    assert sum(int(line.split()[1]) for line in said) == 60
    (decision,) = server.governor.ruling_records
    assert (decision.kind, decision.worker_id, decision.allowed) == ("BACKUP_WORKERS", "slow", True)
    assert decision.reason.startswith("transient straggler (compute) with 1 of the last shards: ")
    results = sorted(tmp_path.iterdir())
    assert [file.name for file in results] == [f"{shard:05d}.txt" for shard in range(60)]
    rows = [int(line.split()[0]) for file in results for line in file.read_text().splitlines()]
    assert rows == list(range(SPEC.num_units))
    with ShardClient(server.address, "fast0") as client:
        report = audit_manifest(client.prepare_checkpoint("end", 1))
    assert report.ok
    assert "  1200 units in the model exactly once (60 whole shards, 0 in part)" in report.lines


def test_a_worker_killed_before_its_result_was_in_effect_finds_it_after_its_restart(
    server: ShardServer, tmp_path: Path
) -> None:
    with ShardClient(server.address, "w") as client:
        client.register_dataset(SPEC)
        won, given_back = client.lease("rows", 0, 2)  # type: ignore[misc]
        assert client.complete(won)
        for lease in (won, given_back):
            (tmp_path / f"{lease.shard_index:05d}.w.{lease.token}.part").write_text("left behind\n")
    with scorer(server, tmp_path, "w", "0") as again:
        assert again.communicate(timeout=PATIENCE_S)[0] == "w: 59 shards counted, 0 discarded\n"
    texts = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert sorted(texts) == [f"{shard:05d}.txt" for shard in range(60)]
    left_behind = [name for name, text in texts.items() if text == "left behind\n"]
    assert left_behind == [f"{won.shard_index:05d}.txt"]


def test_the_loser_learns_it_from_complete(
    server: ShardServer, workers: tuple[ShardClient, ShardClient]
) -> None:
    slow, fast = workers
    (first,) = slow.lease("d", 0)  # type: ignore[misc]
    server.edge.ask(cmd.BackUp("1.1.1", "slow"))
    (second,) = fast.lease("d", 0)  # type: ignore[misc]
    (shown,) = server.edge.read_status().datasets[0].backed_up
    assert (shown.worker_id, shown.backup_worker_id) == ("slow", "fast")
    (dataset,) = server._dashboard.document()["datasets"]
    assert dataset["backed_up"] == [[0, "slow", "fast"]]
    listed = CliRunner().invoke(shards, ["ls", "--service", server.address])
    assert "slow + fast" in listed.output
    assert first.speculative
    assert (fast.complete(second), slow.complete(first)) == (True, False)
    assert slow.held == fast.held == []
    assert (fast.completed(second.token), slow.completed(first.token)) == (True, False)


def test_the_loser_learns_it_while_it_works_and_the_loop_goes_on(
    server: ShardServer, workers: tuple[ShardClient, ShardClient]
) -> None:
    slow, fast = workers
    lost = []
    for lease in slow.shards("d"):
        server.edge.ask(cmd.BackUp("1.1.1", "slow"))
        (second,) = fast.lease("d", 0)  # type: ignore[misc]
        fast.complete(second)
        slow._heartbeat.beat()
        with pytest.raises(LeaseLostError):
            list(lease.units())
        lost.append(lease)
    assert len(lost) == 1


def test_a_loop_leaving_its_speculation_is_told(workers: tuple[ShardClient, ShardClient]) -> None:
    with pytest.raises(ValueError, match="was left without an end; its result counts only once"):
        for _ in workers[0].shards("d"):
            pass


def test_parts_of_a_speculation_are_not_reported(workers: tuple[ShardClient, ShardClient]) -> None:
    (lease,) = workers[0].lease("d", 0)  # type: ignore[misc]
    lease.advance(3)
    workers[0].flush()
    lease.check()
    lease.advance(1)
    workers[0].flush()  # the whole shard is
    assert workers[0].held == []


def test_a_speculative_shard_goes_back_when_its_worker_leaves(server: ShardServer) -> None:
    """Its result may not be ready: it would be missing for ever."""
    with ShardClient(server.address, "a") as client:
        client.register_dataset(DatasetSpec("e", 8, 4, speculative=True))
        through, failing = client.lease("e", 0, 2)  # type: ignore[misc]
        through.advance(4)
        failing.advance(4)
        client.fail(failing, "full-disk", "no room for its result")
    (dataset,) = server.edge.read_status().datasets
    assert (dataset.todo, dataset.done_open) == (2, 0)
