"""A change of shares reaches all ranks in the same step, and every step keeps all its tasks."""

import threading
from pathlib import Path
from typing import Any

import pytest

from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.reports import MonitorConfig
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import DataConfig, OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.steps import batch_without_tasks, iterate_steps
from gmeta.distributed.stopping import Stop
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.leased import LeasedBatchSource
from gmeta.feeds.step_agent import LeasedStepAgent
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio import open_dataset
from tests.distributed.harness import on_ranks

MODEL = ModelConfig(name="dlrm", embedding_dim=4, hidden=(6,), options={"bottom": (5,)})
STEPS_AFTER = 3
MAX_EPOCHS = 200


def train_on_rank(ranks: Ranks, config: TrainConfig) -> tuple[list[list[int]], list[float]]:
    """Tasks of each step until the new shares were seen for a while, and the report's times."""
    dataset = open_dataset(config.data.path)
    learner = build_learner(dataset.features, MODEL, AlgorithmConfig(name="maml"), "bce")
    sharded = shard_learner(learner, dataset.features, config, ranks)
    epochs: list[list[int]] = []
    with LeasedBatchSource(BatchSettings.of(config, dataset), dataset, ranks, None) as feed:
        stop = Stop()
        agent = LeasedStepAgent(config.outer.accumulate_steps, feed, sharded, ranks, stop)
        # What the rank hears its calls to the service hear too, wherever they wait.
        is_stopping, heard = feed.client._session.connection.is_stopping, []
        for stop.is_requested in (True, False):
            heard.append(is_stopping())
        assert heard == [True, False]
        for epoch in range(MAX_EPOCHS):
            steps: list[int] = []
            batches = feed.batches(epoch, 0)
            for episodes, totals in iterate_steps(
                agent.collate_batches(batches, learner.collate),
                learner.collate(batch_without_tasks(dataset.features)),
                ranks,
                sharded=sharded,
                adopt_new_plan=agent.adopt_new_plan,
            ):
                loss = sharded(episodes, weight=ranks.world_size / max(totals.num_terms, 1))
                loss.backward()
                num_tasks = episodes.task_T.numel()
                feed.report_trained(num_tasks)
                agent.finish_step(num_tasks, episodes.num_rows)
                steps.append(num_tasks)
            epochs.append(steps)
            if feed.share != 8 and epoch > 0 and 8 not in epochs[-2][:STEPS_AFTER]:
                break
        totals_of_rank = agent._worker.totals
    return epochs, [totals_of_rank.compute_ms, totals_of_rank.data_wait_ms]


def post_when_running(server: ShardServer, ended: threading.Event) -> None:
    while not ended.wait(0.02):
        status = server.edge.read_status()
        if len(status.workers) == 2 and all(w.report.step > 3 for w in status.workers):
            plan = {"rank0": 12.0, "rank1": 4.0, "micro:rank0": 2.0}
            server.edge.ask(cmd.PostAction("", f"1.{status.run_generation}.1", 2, 0, plan))
            return


@pytest.mark.distributed
def test_shares_change_in_the_same_step_on_all_ranks(click_logs: Path) -> None:
    watched = StragglerConfig(MonitorConfig(window_s=0.2))
    server = ShardServer(ServiceConfig("127.0.0.1:0", stragglers=watched))
    data = DataConfig(
        path=str(click_logs),
        source="service",
        service=server.address,
        tasks_per_step=16,
        task_cost=(1.0, 0.0),  # shares are numbers of tasks
    )
    config = TrainConfig(
        model=MODEL, data=data, run=RunConfig(seed=3), outer=OuterConfig(sparse_lr=0.01)
    )
    ended = threading.Event()
    poster = threading.Thread(target=post_when_running, args=(server, ended))
    poster.start()
    try:
        results: list[Any] = on_ranks(2, train_on_rank, config)
    finally:
        ended.set()
        poster.join()
    server.stop(0.0)
    first, second = (epochs for epochs, _ in results)
    assert len(first) == len(second) < MAX_EPOCHS
    changed = 0
    for mine, theirs in zip(first, second, strict=True):
        full = [(a, b) for a, b in zip(mine, theirs, strict=True) if a + b == 16]
        assert set(full) <= {(8, 8), (12, 4)}
        assert full == sorted(full)  # never back
        assert len(full) >= STEPS_AFTER  # the last steps of an epoch run short
        changed += (8, 8) in full and (12, 4) in full
    assert changed <= 1
    assert (first[-1][0], second[-1][0]) == (12, 4)
    for _, times_ms in results:
        assert times_ms[0] > 0
