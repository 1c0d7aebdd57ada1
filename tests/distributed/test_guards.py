"""A loss or gradient that is no number: every rank ends with one line, which names the batch."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import RunConfig, TrainConfig
from gmeta.data.collate import collate_in_parts
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.errors import GMetaError
from gmeta.runs.build import build_learner
from gmeta.runs.guards import StepGuard, load_batch
from gmeta.runs.run_progress import RunProgress
from gmeta_models import ModelConfig
from metaio.read.batch import TaskBatch
from tests.distributed.harness import on_ranks, steps_of
from tests.support import reference

FEATURES = reference.some_features(2, 0, 1)
MODEL = ModelConfig(name="dlrm", embedding_dim=4, hidden=(3,), options={"bottom": (3,)})
BAD_STEP, NUM_STEPS = 1, 4
ADVICE = (
    "A value in the data is no number, or training diverged. Lower outer.dense_lr, outer.sparse_lr "
    "or algorithm.inner_lr, or divide a label whose scale is far from 1"
)


def batch_of_step(step: int, rank: int) -> TaskBatch:
    rng = random.Random(10 * step + rank)
    tasks = [reference.random_task(FEATURES, 3, 2, rng) for _ in range(4)]
    batch = reference.batch_of(tasks, FEATURES)
    batch = replace(batch, task_T=batch.task_T + 100 * rank, dense_NK=batch.dense_NK.float())
    if step == BAD_STEP and rank == 1:
        batch.dense_NK[2, 0] = torch.nan  # a support row of its first task
    return batch


def train_on_rank(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Trains on a bad batch until the guard ends it; then tells a guard of a bad gradient."""
    config = TrainConfig(model=MODEL, run=RunConfig(seed=1))
    torch.manual_seed(0)
    learner = build_learner(FEATURES, MODEL, AlgorithmConfig(inner_lr=0.1), "bce")
    sharded = shard_learner(learner, FEATURES, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    told: list[str] = []
    ended: list[str] = []
    guard = StepGuard(folder, learner.parameters(), ranks, lambda: ended.append("ending"))
    batches = (batch_of_step(step, ranks.rank) for step in range(NUM_STEPS))
    steps = steps_of(batches, collate_in_parts(learner.collate, 2), FEATURES, ranks)
    done = 0
    try:
        for step, (episodes, totals) in enumerate(steps):
            optimizer.begin_step(step, NUM_STEPS)
            loss = sharded(episodes, ranks.world_size / totals.num_terms)
            loss.backward()
            rows_sum = sharded.local.exchange.gradient_sum
            guard.watch(RunProgress(step, 2, step), episodes, loss, rows_sum)
            optimizer.step()
            done += 1
    except GMetaError as error:
        told.append(str(error))
    for parameter in learner.parameters():
        parameter.grad = None
    rows_sum = torch.tensor(0.5 if ranks.rank else torch.inf)
    guard.watch(RunProgress(7, 0, 7), episodes, torch.tensor(0.5), rows_sum)
    try:
        guard.check()
    except GMetaError as error:
        told.append(str(error))
    next(learner.parameters()).grad = torch.full_like(next(learner.parameters()), torch.nan)
    guard.watch(RunProgress(8, 0, 8), episodes, torch.tensor(0.5), torch.tensor(0.5))
    try:
        guard.check()
    except GMetaError as error:
        told.append(str(error))
    return {"told": told, "done": done, "ended": ended}


@pytest.mark.distributed
def test_all_ranks_end_with_the_batch_that_is_to_blame(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_on_rank, tmp_path)
    assert first == second
    # One step late: the step after the bad one had begun.
    assert first["done"] == BAD_STEP + 1
    assert first["ended"] == ["ending"] * 3
    of_loss, of_gradient, of_layers = first["told"]
    assert of_loss == (
        "step 2 (step 2 of epoch 3): the loss is nan on rank 1, in a batch of tasks "
        f"100, 101, 102, 103, saved as {tmp_path}/step-00000002-rank-1.pt. {ADVICE}"
    )
    assert of_gradient == (
        "step 8 (step 8 of epoch 1): the gradient is not finite on rank 0, in a batch of tasks "
        f"0, 1, 2, 3, saved as {tmp_path}/step-00000008-rank-0.pt. {ADVICE}"
    )
    assert of_layers == (
        "step 9 (step 9 of epoch 1): the gradient of the layers is not finite, though each rank's "
        f"loss and rows are. {ADVICE}"
    )
    expected = ["step-00000002-rank-1.pt", "step-00000008-rank-0.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    parts = load_batch(tmp_path / "step-00000002-rank-1.pt")
    assert [part.task_T.tolist() for part in parts] == [[100, 101], [102, 103]]
    assert [int(part.rows.features[0].dense_NK.isnan().sum()) for part in parts] == [1, 0]
    assert sum(part.rows.query.label_N.numel() for part in parts) == 8


@pytest.mark.distributed
def test_a_batch_that_cannot_be_saved_leaves_no_rank_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = on_ranks(2, train_on_rank, tmp_path / "file" / "bad-batches")
    assert first == second
    of_loss, of_gradient, _ = first["told"]
    assert of_loss == (
        "step 2 (step 2 of epoch 3): the loss is nan on rank 1, in a batch of tasks "
        "100, 101, 102, 103, which cannot be saved: [Errno 20] Not a directory: "
        f"'{tmp_path}/file/bad-batches'. {ADVICE}"
    )
    assert "which cannot be saved" in of_gradient
