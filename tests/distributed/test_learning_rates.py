"""The rate schedule, in layers and tables alike, against a loop that writes the rates out."""

import random

import pytest
import torch
from torch import Tensor

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ExchangeKind, ShardingConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer, rate_scale
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_equals_reference import local_rows, whole_tables
from tests.support import reference

MODEL = ModelConfig(name="melu", embedding_dim=4, hidden=(5,))
FEATURES = reference.some_features(2, 1, 0)
DENSE_RATE, SPARSE_RATE = 0.5, 0.8
NUM_STEPS = 4
EXCHANGES: tuple[ExchangeKind, ...] = ("host", "torchrec")
SCALES = {
    ("linear", 0): [1.0, 0.75, 0.5, 0.25],
    ("linear", 2): [0.5, 1.0, 1.0, 0.5],
    ("cosine", 1): [1.0, 1.0, 0.75, 0.25],
}


def tasks_of_steps() -> list[list[reference.Task]]:
    rng = random.Random(2)
    return [
        [reference.random_task(FEATURES, 2, 2, rng) for _ in range(4)] for _ in range(NUM_STEPS)
    ]


def train_on_rank(ranks: Ranks) -> dict[tuple[ExchangeKind, str, int], dict[str, object]]:
    return {
        (exchange, *case): train_with(ranks, exchange, *case)
        for exchange in EXCHANGES
        for case in SCALES
    }


def train_with(
    ranks: Ranks, exchange: ExchangeKind, schedule: str, warmup_steps: int
) -> dict[str, object]:
    """Train on every other task of each step; rows before and after, and the layers."""
    outer = OuterConfig(
        dense_optimizer="sgd", dense_lr=DENSE_RATE, sparse_optimizer="sgd", sparse_lr=SPARSE_RATE,
        lr_schedule=schedule, warmup_steps=warmup_steps,
    )  # fmt: skip
    torch.manual_seed(3)
    learner = build_learner(FEATURES, MODEL, AlgorithmConfig(name="none"), "bce")
    config = TrainConfig(
        model=MODEL, outer=outer, run=RunConfig(seed=1), sharding=ShardingConfig(exchange=exchange)
    )
    sharded = shard_learner(learner, FEATURES, config, ranks)
    start = local_rows(sharded)
    optimizer = build_optimizer(sharded, outer)
    batches = (
        reference.batch_of(tasks[ranks.rank :: ranks.world_size], FEATURES)
        for tasks in tasks_of_steps()
    )
    begun: list[int] = []

    def begin() -> None:
        optimizer.begin_step(len(begun), NUM_STEPS)
        begun.append(len(begun))

    arranged = learner.collate
    # As a run does: rows are looked up before the step is given out.
    steps = steps_of(batches, arranged, FEATURES, ranks, sharded=sharded, begin=begin)
    for episodes, totals in steps:
        loss = sharded(episodes, ranks.world_size / totals.num_terms)
        loss.backward()
        optimizer.step()
    layers = {name: value.detach().clone() for name, value in learner.named_parameters()}
    return {"start": start, "tables": local_rows(sharded), "layers": layers}


def train_by_loop(
    start: dict[str, Tensor], scales: list[float]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tables and layers after w <- w - scale rate gradient, in float64."""
    torch.manual_seed(3)
    algorithm = AlgorithmConfig(name="none")
    model = build_learner(FEATURES, MODEL, algorithm, "bce").double().model
    tables = {name: rows.double().requires_grad_() for name, rows in start.items()}
    layers = dict(model.named_parameters())
    for scale, tasks in zip(scales, tasks_of_steps(), strict=True):
        loss = reference.outer_loss(model, tables, FEATURES, tasks, algorithm, "bce")
        grads = torch.autograd.grad(loss, [*tables.values(), *layers.values()])
        rates = [SPARSE_RATE] * len(tables) + [DENSE_RATE] * len(layers)
        with torch.no_grad():
            for value, grad, rate in zip(
                [*tables.values(), *layers.values()], grads, rates, strict=True
            ):
                value -= scale * rate * grad
    return tables, layers


@pytest.mark.distributed
def test_layers_and_tables_follow_the_schedule() -> None:
    of_ranks = on_ranks(2, train_on_rank)
    for case in of_ranks[0]:
        results, scales = [of_rank[case] for of_rank in of_ranks], SCALES[case[1:]]
        tables, layers = train_by_loop(whole_tables(results, "start"), scales)
        trained = whole_tables(results, "tables")
        for name, rows in tables.items():
            torch.testing.assert_close(trained[name].double(), rows.detach(), rtol=0, atol=1e-5)
        for result in results:
            for name, value in layers.items():
                torch.testing.assert_close(
                    result["layers"][f"model.{name}"].double(), value.detach(), rtol=0, atol=1e-5
                )


def test_a_warm_up_rises_to_the_full_rate_and_the_schedule_follows() -> None:
    assert [rate_scale("constant", 4, step, 8) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = [rate_scale("cosine", 0, step, 4) for step in range(4)]
    assert cosine == pytest.approx([1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2])
    # A run no longer than its warm-up never reaches the decay.
    found = [rate_scale("linear", 3, step, 3) for step in range(3)]
    assert found == pytest.approx([1 / 3, 2 / 3, 1])
