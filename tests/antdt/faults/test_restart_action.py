"""KILL_RESTART in a real job: all ranks keep their steps, end, and torchrun starts them again."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.reports import MonitorConfig
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from tests.support.commands import SMALL_MODEL, environment, metrics, write_config
from tests.support.forked import Task, forked
from tests.support.waiting import wait_until

KILL_RESTART = 5


@pytest.mark.distributed
def test_a_restart_by_the_controller_loses_no_step(tmp_path: Path, click_logs: Path) -> None:
    watched = StragglerConfig(MonitorConfig(window_s=0.2))
    server = ShardServer(ServiceConfig("127.0.0.1:0", stragglers=watched))
    run = tmp_path / "run"
    config = str(write_config(tmp_path / "train.toml", click_logs, run))
    told = tmp_path / "told"
    told.mkdir()
    endless = ["run.max_steps=0", "run.epochs=1000", "run.checkpoint_every_steps=100000"]
    leased = ["data.source=service", f"data.service={server.address}"]
    ranks = ["--nproc-per-node=2", "--max-restarts=1"]
    command = ("train", config, *SMALL_MODEL, *leased, *endless, *ranks)
    with forked(Task("gmeta", command, environment(), told)) as running:

        def until(holds: Callable[[Any], bool]) -> Any:
            seen: list[Any] = []

            def reached() -> bool:
                assert running.poll() is None, running.stderr[-2000:]
                seen.append(server.edge.read_status())
                return holds(seen[-1])

            wait_until(reached, "what the job reports", pause_s=0.05)
            return seen[-1]

        def all_past(step: int) -> Callable[[Any], bool]:
            return lambda status: (
                len(status.workers) == 2 and all(w.report.step > step for w in status.workers)
            )

        before = until(all_past(5)).run_generation
        server.edge.ask(cmd.PostAction("rank1", f"1.{before}.1", KILL_RESTART, 0, {}))
        until(lambda status: status.run_generation == before + 1)
        # Reports begin anew with the process.
        until(lambda status: all(w.report.step > 0 for w in status.workers))
        assert until(all_past(2)).run_generation == before + 1
    server.stop(0.0)
    steps = [line["step"] for line in metrics(run)]
    assert all(later == earlier + 1 for earlier, later in itertools.pairwise(steps))
    assert "Traceback" not in running.stderr
    assert running.stderr.count("restart 1 of 1: all ranks begin again") == 1
