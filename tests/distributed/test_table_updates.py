"""Our exchange with plain tables against TorchRec's with fbgemm's, under every common plan."""

import random
from typing import Any

import pytest
import torch

from gmeta.config.sharding import DefaultKind, ExchangeKind, ShardingConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.exchange.torchrec import TorchRecExchange
from gmeta.distributed.exchange.wire import WireExchange
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import check_sparse_optimizer, shard_learner
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner
from gmeta_models import InputSizes, ModelConfig, build_model
from tests.distributed.harness import on_ranks
from tests.support import reference
from tests.support.refusals import catch_message

MODEL = ModelConfig(name="melu", embedding_dim=16, hidden=(6,))
COLUMNS = (2, 2, 0)
CASES: dict[str, tuple[DefaultKind, Any]] = {
    "row_wise, sgd": ("row_wise", "sgd"),
    "row_wise, adagrad": ("row_wise", "adagrad"),
    "row_wise, rowwise_adagrad": ("row_wise", "rowwise_adagrad"),
    "table_wise, rowwise_adagrad": ("table_wise", "rowwise_adagrad"),
    "column_wise, adagrad": ("column_wise", "adagrad"),
    "planner, rowwise_adagrad": ("planner", "rowwise_adagrad"),
}
EXCHANGES: dict[ExchangeKind, type] = {"host": WireExchange, "torchrec": TorchRecExchange}


def train_on_rank(ranks: Ranks) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Three steps of each case with each exchange: every local shard and its optimizer state."""
    return {
        case: {exchange: state_after(ranks, exchange, *CASES[case]) for exchange in EXCHANGES}
        for case in CASES
    }


def state_after(
    ranks: Ranks, exchange: ExchangeKind, kind: DefaultKind, optimizer_name: Any
) -> dict[str, torch.Tensor]:
    features = reference.some_features(*COLUMNS)
    outer = OuterConfig(sparse_optimizer=optimizer_name, sparse_lr=0.1)
    sharding = ShardingConfig(default=kind, exchange=exchange)
    config = TrainConfig(model=MODEL, outer=outer, sharding=sharding, run=RunConfig(seed=3))
    torch.manual_seed(0)
    learner = MetaLearner(build_model(MODEL, InputSizes(*COLUMNS)), config.algorithm, "bce")
    sharded = shard_learner(learner, features, config, ranks)
    assert type(sharded.local.exchange) is EXCHANGES[exchange]
    optimizer = build_optimizer(sharded, outer)
    rng = random.Random(ranks.rank)
    for step in range(3):
        # A rank without a task takes part in every exchange.
        num_tasks = max(0, 3 - ranks.rank)
        tasks = [reference.random_task(features, 4, 3, rng) for _ in range(num_tasks)]
        batch = reference.batch_of(tasks, features)
        if step == 1:
            batch = reference.ids_twice(batch)
        episodes = learner.collate(batch)
        optimizer.begin_step(step, 3)
        sharded(episodes, weight=1.0).backward()
        optimizer.step()
    return flat({"model": sharded.state_dict(), "optimizer": optimizer.state_dict()["state"]})


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
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_our_exchange_leaves_what_torchrecs_leaves(world_size: int) -> None:
    for of_rank in on_ranks(world_size, train_on_rank):
        for case, by_exchange in of_rank.items():
            ours, theirs = by_exchange["host"], by_exchange["torchrec"]
            assert ours.keys() == theirs.keys()
            for path, value in theirs.items():
                torch.testing.assert_close(
                    ours[path], value, rtol=1e-5, atol=1e-6, msg=f"{case}: {path}"
                )


def test_an_optimizer_that_fbgemm_lacks_on_the_cpu_is_refused_with_its_kernels() -> None:
    check_sparse_optimizer("adam", torch.device("cuda"))
    assert catch_message(ConfigError, check_sparse_optimizer, "adam", torch.device("cpu")) == (
        "outer.sparse_optimizer = 'adam' with sharding.exchange = \"torchrec\" needs CUDA: fbgemm "
        'has no such fused update on a CPU. Set sharding.exchange = "host", or choose one of sgd, '
        "adagrad, rowwise_adagrad"
    )
