"""AntDT-DD in a real job: two ranks at speeds 1:3, micro-batches, and the gradient of one rank."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gmeta.antdt.policies.interface import ControllerConfig
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
from metaio import EpisodeRange, RangeReader, open_dataset
from tests.distributed.harness import on_ranks
from tests.distributed.test_equals_reference import local_rows, whole_tables
from tests.support.waiting import PATIENCE_S

MODEL = ModelConfig(name="dlrm", embedding_dim=4, hidden=(6,), options={"bottom": (5,)})
TASKS_PER_STEP, MAX_MICRO_BATCH = 40, 8
# By rank: hardware of two generations. So long that what this machine really takes is nothing.
TASK_S = (0.3, 0.9)


class ScriptedClock:
    """Stands in for the rank's clock: time that passes in no test."""

    def __init__(self, task_s: float) -> None:
        self.num_started = self.num_tasks = 0
        self._task_s = task_s

    def start(self, rows_UD: torch.Tensor) -> None:
        """Called for every step's rows."""

    def take(self) -> list[tuple[int, float]]:
        """What the step's tasks take on this hardware."""
        return [(self.num_started, self.num_tasks * self._task_s)]


def make_learner(features: Any) -> Any:
    torch.manual_seed(3)
    return build_learner(features, MODEL, AlgorithmConfig(name="maml"), "bce")


def train_on_rank(ranks: Ranks, config: TrainConfig) -> dict[str, Any]:
    """The shares of every full step, and the last one's tasks and gradient."""
    dataset = open_dataset(config.data.path)
    learner = make_learner(dataset.features)
    sharded = shard_learner(learner, dataset.features, config, ranks)
    start = local_rows(sharded)
    shares, last = [], {}
    give_up_s = time.monotonic() + PATIENCE_S
    with LeasedBatchSource(BatchSettings.of(config, dataset), dataset, ranks, None) as feed:
        agent = LeasedStepAgent(config.outer.accumulate_steps, feed, sharded, ranks, Stop())
        clock = agent._meter.clock = ScriptedClock(TASK_S[ranks.rank])  # type: ignore[assignment]
        for epoch in range(1000):
            for episodes, totals in iterate_steps(
                agent.collate_batches(feed.batches(epoch, 0), learner.collate),
                learner.collate(batch_without_tasks(dataset.features)),
                ranks,
                sharded=sharded,
                adopt_new_plan=agent.adopt_new_plan,
            ):
                learner.zero_grad()
                loss = sharded(episodes, weight=ranks.world_size / max(totals.num_terms, 1))
                num_tasks = episodes.task_T.numel()
                loss.backward()
                clock.num_tasks = num_tasks
                feed.report_trained(num_tasks)
                agent.finish_step(num_tasks, episodes.num_rows)
                if totals.num_terms == TASKS_PER_STEP:
                    shares.append(num_tasks)
                    last = {
                        "tasks": episodes.task_T.tolist(),
                        "parts": len(getattr(episodes, "parts", [episodes])),
                        "layers": {n: p.grad.clone() for n, p in learner.named_parameters()},
                    }
            # All ranks leave behind the same epoch: rank 0's clock decides.
            over = torch.tensor([int(time.monotonic() > give_up_s or len(set(shares[-12:])) == 1)])
            over *= int(len(shares) > 12 and shares[-1] != TASKS_PER_STEP // 2)
            torch.distributed.broadcast(over, 0, group=ranks.control)
            if over:
                break
    return {"start": start, "shares": shares, **last}


def gradient_of_one_rank(data: Path, tasks: set[int], tables: dict[str, Any]) -> dict[str, Any]:
    """Of the mean over these tasks, without ranks, services or parts."""
    dataset = open_dataset(str(data))
    with RangeReader(dataset) as reader:
        split = dataset.split("train")
        (whole,) = reader.batches([[EpisodeRange("train", 0, split.num_episodes)]])
        where = [i for i, task in enumerate(whole.task_T.tolist()) if task in tasks]
        (batch,) = reader.batches([[EpisodeRange("train", i, 1) for i in where]])
    learner = make_learner(dataset.features)
    ids = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    names = [table.name for table in dataset.features.tables]
    rows = torch.cat([tables[name][of_table] for name, of_table in zip(names, ids, strict=True)])
    learner(rows.requires_grad_(), learner.collate(batch), 1 / len(tasks)).backward()
    return {name: parameter.grad for name, parameter in learner.named_parameters()}


@pytest.mark.distributed
def test_two_speeds_get_the_best_micro_batches_and_the_same_gradient(click_logs: Path) -> None:
    watched = StragglerConfig(
        MonitorConfig(window_s=0.2), ControllerConfig("dd", max_micro_batch=MAX_MICRO_BATCH)
    )
    server = ShardServer(ServiceConfig("127.0.0.1:0", stragglers=watched))
    data = DataConfig(
        path=str(click_logs),
        source="service",
        service=server.address,
        tasks_per_step=TASKS_PER_STEP,
        task_cost=(1.0, 0.0),  # as the scripted clock has it
    )
    # No step is taken: every gradient is that of the first parameters, whatever the order of tasks.
    outer = OuterConfig(sparse_lr=1e-12, sparse_optimizer="sgd")
    config = TrainConfig(model=MODEL, data=data, run=RunConfig(seed=3), outer=outer)
    results = on_ranks(2, train_on_rank, config)
    server.stop(0.0)

    shares = [result["shares"][-1] for result in results]
    assert sum(shares) == TASKS_PER_STEP
    best_s = 30 * TASK_S[0]  # 30 and 10 tasks end together
    assert max(n * s for n, s in zip(shares, TASK_S, strict=True)) <= 1.05 * best_s
    assert [result["parts"] for result in results] == [-(-n // MAX_MICRO_BATCH) for n in shares]

    tasks = {task for result in results for task in result["tasks"]}
    assert len(tasks) == TASKS_PER_STEP
    expected = gradient_of_one_rank(click_logs, tasks, whole_tables(results, "start"))
    for name, grad in expected.items():
        for result in results:
            torch.testing.assert_close(result["layers"][name], grad, rtol=1e-4, atol=1e-6)
