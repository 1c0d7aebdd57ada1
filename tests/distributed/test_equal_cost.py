"""Slices of equal cost train the steps of one rank, at any number of ranks and over a resume."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import DataConfig, OuterConfig, RunConfig, TrainConfig
from gmeta.data.reader import open_reader
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.leased import LeasedBatchSource
from gmeta.runs.build import build_learner
from gmeta.training import train
from gmeta_models import ModelConfig
from metaio import TaskBatch, open_dataset
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.distributed.harness import on_ranks, steps_of

MODEL = ModelConfig(name="dlrm", embedding_dim=4, hidden=(8,), options={"bottom": (6,)})
NUM_TASKS = 90
COUNTED = [{"tasks_per_step": 12}, {"rows_per_step": 500}]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 tasks of 6 to 80 rows."""
    path = tmp_path_factory.mktemp("data") / "uneven"
    sizes = SyntheticConfig(
        num_tasks=NUM_TASKS, num_items=60, min_rows=6, max_rows=80, query_rows=5, block_rows=300
    )
    prepare_synthetic(str(path), sizes)
    return path


class Trained(NamedTuple):
    tasks: list[list[int]]  # of this rank, step by step
    rows: list[int]
    losses: list[float]


def as_float64(batch: TaskBatch) -> TaskBatch:
    return replace(batch, label_N=batch.label_N.double(), dense_NK=batch.dense_NK.double())


def train_on_rank(ranks: Ranks, config: TrainConfig) -> Trained:
    """An epoch in float64. Tables, which store float32, keep their first values."""
    dataset = open_dataset(config.data.path)
    torch.manual_seed(3)
    learner = build_learner(dataset.features, MODEL, config.algorithm, "bce").double()
    learner.register_forward_pre_hook(lambda _, given: (given[0].double(), *given[1:]))
    sharded = shard_learner(learner, dataset.features, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    found = Trained([], [], [])
    of_rank = config.data, config.run.seed, dataset, "train", ranks.rank, ranks.world_size
    with open_reader(*of_rank) as reader:
        for episodes, totals in steps_of(
            map(as_float64, reader.batches(0)), learner.collate, dataset.features, ranks,
            sharded=sharded,
        ):  # fmt: skip
            optimizer.begin_step(len(found.losses), 100)
            loss = sharded(episodes, ranks.world_size / totals.num_terms)
            loss.backward()
            optimizer.step()
            assert loss.dtype == torch.float64
            found.tasks.append(sorted(episodes.task_T.tolist()))
            found.rows.append(episodes.num_rows)
            found.losses.append(loss.item())
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("counted", COUNTED, ids=lambda counted: next(iter(counted)))
def test_losses_are_those_of_one_rank_in_float64(uneven: Path, counted: dict[str, int]) -> None:
    config = TrainConfig(
        data=DataConfig(path=str(uneven), **counted),  # type: ignore[arg-type]
        model=MODEL,
        algorithm=AlgorithmConfig(name="maml", inner_lr=0.1),
        outer=OuterConfig(sparse_lr=0.0, sparse_optimizer="sgd", dense_lr=0.05),
        run=RunConfig(seed=3),
    )
    (alone,) = on_ranks(1, train_on_rank, config)
    assert sorted(itertools.chain(*alone.tasks)) == sorted(set(itertools.chain(*alone.tasks)))
    assert sum(map(len, alone.tasks)) == NUM_TASKS
    assert alone.losses[-1] != alone.losses[0]
    for world_size in (2, 4):
        ranks = on_ranks(world_size, train_on_rank, config)
        for step, (tasks, loss) in enumerate(zip(alone.tasks, alone.losses, strict=True)):
            assert sorted(itertools.chain(*(rank.tasks[step] for rank in ranks))) == tasks
            mean = sum(rank.losses[step] for rank in ranks) / world_size
            assert mean == pytest.approx(loss, rel=1e-12)
        # Not equal numbers: the ranks' rows are nearer to each other than those would be.
        sizes = [len(rank.tasks[step]) for rank in ranks for step in range(len(alone.tasks) - 1)]
        assert max(sizes) > min(sizes) + 1


def trained_losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def run_on_rank(ranks: Ranks, config: TrainConfig) -> None:
    train(config, ranks)


@pytest.mark.distributed
@pytest.mark.parametrize("counted", COUNTED, ids=lambda counted: next(iter(counted)))
def test_a_run_goes_on_at_other_numbers_of_ranks_inside_an_epoch(
    uneven: Path, tmp_path: Path, counted: dict[str, int]
) -> None:
    def config(name: str, max_steps: int) -> TrainConfig:
        run = RunConfig(
            dir=str(tmp_path / name), epochs=2, max_steps=max_steps, log_every_steps=1, seed=3
        )
        data = DataConfig(path=str(uneven), **counted)  # type: ignore[arg-type]
        return TrainConfig(data=data, model=MODEL, run=run)

    on_ranks(1, run_on_rank, config("alone", 0))
    alone = trained_losses(tmp_path / "alone")
    for world_size, max_steps in ((2, 3), (4, 11), (1, 0)):
        on_ranks(world_size, run_on_rank, config("resumed", max_steps))
    assert len(alone) > 12
    assert trained_losses(tmp_path / "resumed") == pytest.approx(alone, rel=1e-4)


def lease_on_rank(ranks: Ranks, config: TrainConfig) -> list[tuple[int, int]]:
    """Tasks and rows of this rank's batches of an epoch; rank 0 has three quarters of a step."""
    dataset, found = open_dataset(config.data.path), []
    with LeasedBatchSource(BatchSettings.of(config, dataset), dataset, ranks, None) as feed:
        feed.change_share(9 if ranks.rank == 0 else 3, 1)
        for batch in feed.batches(0, 0):
            found.append((batch.num_tasks, batch.num_rows))
            feed.report_trained(batch.num_tasks)
        # As the controller counts a rank's work: in tasks of the mean cost.
        mean_cost = 4 + dataset.split("train").num_rows / NUM_TASKS
        for tasks, rows in found:
            counted = feed.mean_tasks_of(tasks, rows)
            assert counted == pytest.approx((4 * tasks + rows) / mean_cost)
    return found


@pytest.mark.distributed
def test_shares_of_leased_tasks_are_shares_of_cost(uneven: Path) -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    data = DataConfig(path=str(uneven), source="service", service=server.address, tasks_per_step=12)
    config = TrainConfig(data=data, run=RunConfig(seed=3))
    results: list[Any] = on_ranks(2, lease_on_rank, config)
    server.stop(0.0)
    assert sum(tasks for found in results for tasks, _ in found) == NUM_TASKS
    rows_of_split = open_dataset(str(uneven)).split("train").num_rows
    assert sum(rows for found in results for _, rows in found) == rows_of_split
    mean_cost, longest = 4 + rows_of_split / NUM_TASKS, 4 + 80
    for share, found in zip((9, 3), results, strict=True):
        full = [4 * tasks + rows for tasks, rows in found if tasks]
        # The last batches of an epoch run short. A batch misses its share by half a task at most.
        for cost in full[:3]:
            assert abs(cost - share * mean_cost) <= longest / 2
    numbers = [[tasks for tasks, _ in found[:3]] for found in results]
    assert numbers != [[9] * 3, [3] * 3]
