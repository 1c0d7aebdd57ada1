"""Groups of ranks with copies of the tables train, step by step, the model of one group of all."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.unsharded import SPARSE_OPTIMIZERS
from gmeta.platform.internals import ShardedTensor
from gmeta.runs.build import build_learner
from gmeta.runs.checkpoints.loader import collect_state
from gmeta_models import ModelConfig
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_equals_reference import STEPS, tasks_of_step
from tests.support import reference

MODEL = ModelConfig(name="dlrm", embedding_dim=16, hidden=(6,), options={"bottom": (5,)})
WIDTHS = replace(MODEL, widths=("s0=4",))
CASES: dict[str, tuple[ModelConfig, dict[str, Any], dict[str, Any]]] = {
    **{name: (MODEL, {"sparse_optimizer": name}, {}) for name in SPARSE_OPTIMIZERS},
    "clipped": (MODEL, {"sparse_optimizer": "adagrad", "clip_norm": 0.25}, {}),
    "decayed": (MODEL, {"sparse_optimizer": "adam", "sparse_weight_decay": 0.1}, {}),
    "whole tables": (MODEL, {"sparse_optimizer": "adagrad"}, {"default": "table_wise"}),
    "columns": (MODEL, {"sparse_optimizer": "adagrad"}, {"default": "column_wise"}),
    "two widths": (WIDTHS, {"sparse_optimizer": "rowwise_adagrad"}, {}),
}


@contextmanager
def in_float64() -> Iterator[None]:
    """Layers, tables, their optimizers and all that travels have 64 bits."""
    torch.set_default_dtype(torch.float64)
    with mock.patch.object(SparseType, "as_dtype", return_value=torch.float64):
        yield
    torch.set_default_dtype(torch.float32)


def config_of(case: str, groups: int, **sharding: Any) -> TrainConfig:
    model, outer, of_tables = CASES[case]
    return TrainConfig(
        model=model,
        outer=OuterConfig(dense_lr=0.01, sparse_lr=0.1, **outer),
        run=RunConfig(seed=11),
        sharding=ShardingConfig(groups=groups, **of_tables, **sharding),
    )


def train(ranks: Ranks, config: TrainConfig) -> dict[str, Any]:
    """Losses and the state for a checkpoint: this rank's parts of tables by first row, column."""
    features, tasks = tasks_of_step("none, sgd")
    share = range(4 * ranks.rank // ranks.world_size, 4 * (ranks.rank + 1) // ranks.world_size)
    torch.manual_seed(3)
    learner = build_learner(features, config.model, AlgorithmConfig(inner_lr=0.1), "bce")
    sharded = shard_learner(learner, features, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    batches = (
        reference.batch_of(
            [task for rank in share for task in (tasks[rank][step : step + 1] or [[]])[0]], features
        )
        for step in range(max(len(tasks[rank]) for rank in share))
    )
    losses = []
    for episodes, totals in steps_of(batches, learner.collate, features, ranks, sharded=sharded):
        optimizer.begin_step(len(losses), STEPS)
        loss = sharded(episodes, ranks.world_size / totals.num_terms)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": dict(parts_of(collect_state(sharded, optimizer)))}


def parts_of(
    state: dict[str, Any], prefix: str = "", live: bool = False
) -> Iterator[tuple[str, Any]]:
    """Names and tensors, or a rank's parts of one with their first rows; `live`: not copies."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from parts_of(value, f"{prefix}{name}.", live)
        elif isinstance(value, ShardedTensor):
            yield (
                prefix + name,
                [
                    (
                        tuple(part.metadata.shard_offsets),
                        part.tensor if live else part.tensor.clone(),
                    )
                    for part in value.local_shards()
                ],
            )
        elif isinstance(value, Tensor):
            yield prefix + name, value.detach() if live else value.detach().clone()


def joined(of_ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The whole state, put together from the parts of a group's ranks."""
    whole = {}
    # A rank without rows of a table may know nothing of its state.
    found = {name: value for one in of_ranks for name, value in one["state"].items()}
    for name, value in found.items():
        if isinstance(value, Tensor):
            whole[name] = value
            continue
        parts = sorted(
            (part for one in of_ranks for part in one["state"].get(name, [])),
            key=lambda part: part[0],
        )
        if not parts:  # what SGD keeps
            continue
        cut_columns = len(parts) > 1 and len({where[0] for where, _ in parts}) == 1
        whole[name] = torch.cat([rows for _, rows in parts], dim=1 if cut_columns else 0)
    return whole


def train_all(ranks: Ranks, groups: int) -> dict[str, dict[str, Any]]:
    with in_float64():
        return {case: train(ranks, config_of(case, groups)) for case in CASES}


@pytest.mark.distributed
def test_groups_train_the_model_of_one_rank() -> None:
    alone = on_ranks(1, train_all, 1)
    for world_size, groups in ((4, 1), (4, 2), (2, 2)):
        results, size = on_ranks(world_size, train_all, groups), world_size // groups
        for case in CASES:
            of_ranks = [one[case] for one in results]
            losses = torch.tensor([one["losses"] for one in of_ranks], dtype=torch.float64)
            expected = torch.tensor(alone[0][case]["losses"], dtype=torch.float64)
            torch.testing.assert_close(losses.mean(dim=0), expected, rtol=0, atol=1e-10)
            copies = [
                joined(of_ranks[first : first + size]) for first in range(0, world_size, size)
            ]
            for name, value in joined([alone[0][case]]).items():
                assert value.dtype in (torch.float64, torch.float32), (
                    name
                )  # Adam's steps are 32 bits
                torch.testing.assert_close(copies[0][name], value, rtol=0, atol=1e-10)
                assert all(torch.equal(copy[name], copies[0][name]) for copy in copies)
