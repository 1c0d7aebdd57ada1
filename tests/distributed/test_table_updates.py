"""The CPU tables' fast arithmetic against fbgemm's own: weights, optimizer state, state dict."""

import random
from typing import Any

import pytest
import torch

from gmeta.config import OuterConfig, RunConfig, TrainConfig
from gmeta.learner import MetaLearner
from gmeta.outer.optimizers import build_optimizer
from gmeta.parallel.exchange.wire import WireExchange
from gmeta.parallel.ranks import Ranks
from gmeta.parallel.sharding import local_learner, shard_learner
from gmeta_models import InputSizes, ModelConfig, build_model
from tests import reference
from tests.distributed.harness import on_ranks

MODEL = ModelConfig(name="melu", embedding_dim=4, hidden=(6,))
COLUMNS = (2, 2, 0)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def train_on_rank(ranks: Ranks, stock: bool) -> dict[str, Any]:
    """Three steps with each optimizer; every local shard and its optimizer state."""
    features = reference.some_features(*COLUMNS)
    results = {}
    for optimizer_name in OPTIMIZERS:
        outer = OuterConfig(sparse_optimizer=optimizer_name, sparse_lr=0.1)
        config = TrainConfig(model=MODEL, outer=outer, run=RunConfig(seed=3))
        torch.manual_seed(0)
        learner = MetaLearner(build_model(MODEL, InputSizes(*COLUMNS)), config.algorithm, "bce")
        sharded = shard_learner(learner, features, config, ranks, stock_kernels=stock)
        optimizer = build_optimizer(sharded, outer)
        rng = random.Random(ranks.rank)
        for _ in range(3):
            tasks = [reference.random_task(features, 4, 3, rng) for _ in range(3 - ranks.rank)]
            episodes = learner.arrange(reference.batch_of(tasks, features))
            optimizer.zero_grad()
            sharded(episodes, weight=1.0).backward()
            optimizer.step()
        results[optimizer_name] = {
            "state": flat({**sharded.state_dict(), **optimizer.state_dict()["state"]}),
            "exchange": type(local_learner(sharded).exchange),
        }
    return results


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor, and this rank's part of every sharded one, by its path."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        path = f"{prefix}/{name}"
        if isinstance(value, dict):
            tensors |= flat(value, path)
        elif hasattr(value, "local_shards"):
            tensors |= {f"{path}/{i}": s.tensor.clone() for i, s in enumerate(value.local_shards())}
        elif isinstance(value, torch.Tensor):
            tensors[path] = value.detach().clone()
    return tensors


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_fast_update_leaves_what_fbgemm_leaves(world_size: int) -> None:
    fast = on_ranks(world_size, train_on_rank, False)
    stock = on_ranks(world_size, train_on_rank, True)
    for ours, theirs in zip(fast, stock, strict=True):
        for name in OPTIMIZERS:
            assert ours[name]["exchange"] is WireExchange
            assert theirs[name]["exchange"] is not WireExchange
            assert ours[name]["state"].keys() == theirs[name]["state"].keys()
            for path, value in theirs[name]["state"].items():
                torch.testing.assert_close(
                    ours[name]["state"][path], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {path}"
                )
