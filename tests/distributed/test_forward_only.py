"""The encoder and Meta-Embedding on 1, 2 and 3 ranks: one model, also where a rank has nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.runs.build import build_learner
from tests.adaptation.test_metaemb import FEATURES, MODEL, PAPER, item_tasks
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_equals_reference import local_rows, whole_tables
from tests.support import reference

FORWARD = AlgorithmConfig(name="encoder", options={"encoder_hidden": (6, 3), "cold_weight": 0.3})
CASES = {
    "encoder": FORWARD,
    "encoder by attention, then maml": replace(
        FORWARD,
        name="encoder_maml",
        options={**FORWARD.options, "encoder_pooling": "attention"},
        inner_lr=0.1,
    ),
    "metaemb": replace(PAPER, inner_steps=2),
    "metaemb on a frozen base": replace(PAPER, options={**PAPER.options, "train_base": False}),
}
# Of each step, by rank of 3: 1 rank has all of them, of 2 the second has those of the last two.
STEPS = [
    [[(3, 2), (0, 1)], [(0, 2)], [(2, 2), (4, 1)]],
    [[(1, 3)], [], [(0, 2), (5, 2)]],
    [[], [(4, 2)], [(3, 1)]],
]


def share_of(rank: int, world_size: int) -> list[list[reference.Task]]:
    """The tasks of each step on a rank; all items differ."""
    shares = []
    for number, step in enumerate(STEPS):
        sizes = [size for of_rank in step for size in of_rank]
        tasks = iter(item_tasks(sizes, seed=number))
        by_rank = [[next(tasks) for _ in of_rank] for of_rank in step]
        mine = range(3 * rank // world_size, 3 * (rank + 1) // world_size)
        shares.append([task for each in mine for task in by_rank[each]])
    return shares


def train_on_rank(ranks: Ranks) -> dict[str, Any]:
    """Train each case; the layers and this rank's rows of the tables, before and after."""
    results = {}
    outer = OuterConfig(dense_lr=0.01, sparse_lr=0.1, sparse_optimizer="rowwise_adagrad")
    for case, algorithm in CASES.items():
        torch.manual_seed(3)
        learner = build_learner(FEATURES, MODEL, algorithm, "bce")
        first = {name: value.detach().clone() for name, value in learner.named_parameters()}
        config = TrainConfig(model=MODEL, outer=outer, run=RunConfig(seed=11))
        sharded = shard_learner(learner, FEATURES, config, ranks)
        start = local_rows(sharded)
        optimizer = build_optimizer(sharded, config.outer)
        shares = share_of(ranks.rank, ranks.world_size)
        batches = (reference.batch_of(tasks, FEATURES) for tasks in shares)
        for episodes, totals in steps_of(
            batches, learner.collate, FEATURES, ranks, sharded=sharded
        ):
            loss = sharded(episodes, ranks.world_size / totals.num_terms)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results[case] = {
            "first": first,
            "layers": {name: value.detach().clone() for name, value in learner.named_parameters()},
            "start": start,
            "tables": local_rows(sharded),
        }
    return results


@pytest.mark.distributed
def test_any_number_of_ranks_trains_the_same_encoder_and_generator() -> None:
    alone = on_ranks(1, train_on_rank)
    for world_size in (2, 3):
        together = on_ranks(world_size, train_on_rank)
        for case in CASES:
            mine = [result[case] for result in together]
            for rank in mine:
                for name, value in alone[0][case]["layers"].items():
                    torch.testing.assert_close(rank["layers"][name], value, rtol=0, atol=1e-5)
            tables = whole_tables(mine, "tables")
            for name, rows in whole_tables([alone[0][case]], "tables").items():
                torch.testing.assert_close(tables[name], rows, rtol=0, atol=1e-5)


@pytest.mark.distributed
def test_all_parts_learn_and_a_frozen_base_stays_bit_by_bit() -> None:
    for case, result in on_ranks(2, train_on_rank)[0].items():
        frozen = "frozen" in case
        for name, value in result["layers"].items():
            stays = frozen and name.startswith("model.")
            assert torch.equal(value, result["first"][name]) == stays, (case, name)
        moved = {
            name: any(
                not torch.equal(old, new)
                for (_, old), (_, new) in zip(result["start"][name], rows, strict=True)
            )
            for name, rows in result["tables"].items()
        }
        if frozen:
            assert not any(moved.values())
