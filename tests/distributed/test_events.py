"""Runs of models that read events: 1, 2 and 4 gloo ranks take the same steps."""

from typing import Any

import numpy as np
import pytest
import torch

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.runs.build import build
from metaio.read.compose import compose
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_equals_reference import local_rows, whole_tables
from tests.metaio.prepare.test_events import log, prepared, schema

CASES: dict[str, dict[str, Any]] = {
    "maml over sasrec": {"algorithm": {"name": "maml", "inner_lr": 0.1}, "events": "sasrec"},
    "fomaml over sim": {"algorithm": {"name": "fomaml", "inner_lr": 0.1}, "events": "sim"},
    "none over hstu": {"algorithm": {"name": "none"}, "events": "hstu"},
    # Two heads: of four ranks two share them, and two such groups the places.
    "maml over sasrec, shared": {
        "algorithm": {"name": "maml", "inner_lr": 0.1},
        "events": "sasrec",
        "sharding": {"sequence": "both", "sequence_from": 36},
    },
    "none over hstu, shared": {
        "algorithm": {"name": "none"},
        "events": "hstu",
        "sharding": {"sequence": "ring", "sequence_from": 36},
    },
    "dot over sasrec, popular negatives": {
        "algorithm": {"name": "none"},
        "events": "sasrec",
        "model": {"name": "dot"},
        "outer": {"loss": "softmax", "negatives": "popular", "popular_negatives": 30},
    },
}
# Tasks of each step; with four ranks some have none in the second.
STEPS = (9, 3, 7)


def config_of(path: str, case: str) -> TrainConfig:
    own = CASES[case]
    model = {"name": "melu", "hidden": [6], "embedding_dim": 4, "events": own["events"]}
    model |= own.get("model", {})
    return config_from_dict(
        {
            "data": {"path": path, "tasks_per_step": 8},
            "model": model,
            "algorithm": own["algorithm"],
            "sharding": own.get("sharding", {}),
            "outer": {
                "dense_optimizer": "sgd", "dense_lr": 0.1, "sparse_optimizer": "sgd",
                "sparse_lr": 0.1, **own.get("outer", {}),
            },
            "run": {"dir": "unused", "device": "cpu"},
        }
    )  # fmt: skip


def train_on_rank(ranks: Ranks, path: str) -> dict[str, dict[str, Any]]:
    results = {}
    for case in CASES:
        config = config_of(path, case)
        dataset, learner = build(config)
        sharded = shard_learner(learner, dataset.features, config, ranks)
        optimizer = build_optimizer(sharded, config.outer)
        block = dataset.read_block("train", 0)
        batches, first = [], 0
        for size in STEPS:
            bounds = first + np.arange(ranks.world_size + 1) * size // ranks.world_size
            own = np.arange(bounds[ranks.rank], bounds[ranks.rank + 1])
            batches.append(compose(dataset.features, [(block, own)]))
            first += size
        losses = []
        batches = list(learner.collate_options().with_drawn_items(iter(batches), 0, 0))
        steps = steps_of(batches, learner.collate, dataset.features, ranks, sharded=sharded)
        for episodes, totals in steps:
            optimizer.begin_step(len(losses), len(STEPS))
            loss = sharded(episodes, ranks.world_size / totals.num_terms)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        layers = {name: value.detach().clone() for name, value in learner.named_parameters()}
        results[case] = {"losses": losses, "layers": layers, "tables": local_rows(sharded)}
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, Any]]]]:
    body = schema(dense=[{"column": "number", "standardise": True}])
    path = prepared(tmp_path_factory.mktemp("events"), log(), body)
    return {world_size: on_ranks(world_size, train_on_rank, path) for world_size in (1, 2, 4)}


@pytest.mark.parametrize("case", CASES)
def test_ranks_take_the_steps_of_one(
    trained: dict[int, list[dict[str, dict[str, Any]]]], case: str
) -> None:
    (one,) = (of_rank[case] for of_rank in trained[1])
    assert len(one["losses"]) == len(STEPS)
    tables = whole_tables([one], "tables")
    for world_size in (2, 4):
        several = [of_rank[case] for of_rank in trained[world_size]]
        means = np.mean([of_rank["losses"] for of_rank in several], axis=0)
        np.testing.assert_allclose(means, one["losses"], rtol=1e-5)
        for name, rows in whole_tables(several, "tables").items():
            torch.testing.assert_close(rows, tables[name], rtol=0, atol=1e-5)
        for of_rank in several:
            for name, weight in of_rank["layers"].items():
                torch.testing.assert_close(weight, one["layers"][name], rtol=0, atol=1e-5)
