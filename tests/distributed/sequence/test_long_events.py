"""Steps of a learner whose ranks share long tasks' events against one rank's, in float64."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gmeta.config.sharding import SequenceKind, ShardingConfig, check_sequences
from gmeta.config.train_config import TrainConfig
from gmeta.data.accumulate import MicroBatches
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.long_events import spread_long_events
from gmeta.distributed.sharded_learner import ShardedLearner
from gmeta.distributed.steps import batch_without_tasks
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner
from gmeta_models import ModelConfig
from metaio import open_dataset
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose
from tests.data.test_event_layout import ENCODERS, WIDTH, learner_of
from tests.distributed.harness import on_ranks
from tests.distributed.sequence.messages import counted_messages
from tests.metaio.prepare.test_events import NUM_USERS, log, prepared, schema
from tests.support.commands import evaluate, succeed
from tests.support.refusals import catch_message

LONG_FROM = 40


@dataclass(frozen=True)
class Case:
    encoder: str
    algorithm: str = "none"
    kinds: tuple[SequenceKind, ...] = ("ring",)


CASES = (
    Case("sasrec", "maml", ("ring", "both", "ulysses")),
    Case("sasrec, linear", "fomaml"),
    Case("sasrec", "reptile"),
    Case("hstu", "maml", ("both",)),
    Case("hstu", "none", ("ring",)),
    Case("din", "maml", ("both",)),
)


def stored(path: str) -> tuple[Any, Any, np.ndarray]:
    """The dataset's features, a block, and how many events each of its tasks has."""
    dataset = open_dataset(path)
    block = dataset.read_block("train", 0)
    every = np.arange(block.num_episodes)
    return (
        dataset.features,
        block,
        compose(dataset.features, [(block, every)]).num_events_T.numpy(),
    )


def tasks_of(rank: int, world_size: int, num_events_T: np.ndarray, step: str) -> np.ndarray:
    """Only the last rank has long tasks, and of several ranks the second has none at all."""
    is_long_T = num_events_T >= LONG_FROM
    long, short = np.flatnonzero(is_long_T), np.flatnonzero(~is_long_T)
    if step == "short":
        long = long[:0]
    if world_size == 1:
        return np.sort(np.concatenate([short, long]))
    # The second of four has no task; of two it has the long ones alone.
    of_rank = {0: short if world_size == 2 else short[:5], 2: short[5:]}.get(rank, short[:0])
    return np.sort(np.concatenate([of_rank, long])) if rank == world_size - 1 else of_rank


def fetched(batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """The rows of a table of them all, and which those are."""
    tables = torch.repeat_interleave(
        torch.arange(len(batch.unique_lengths_B)), batch.unique_lengths_B
    )
    place_U = tables * 1000 + batch.unique_ids_U
    shape = 1000 * len(batch.unique_lengths_B), WIDTH
    table = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return table, place_U


def step_on_rank(ranks: Ranks, path: str, share: bool) -> dict[str, Any]:
    features, block, num_events_T = stored(path)
    found = {}
    for case in CASES:
        for kind in case.kinds:
            if share and kind == "ulysses" and ranks.world_size == 4:  # of two heads
                continue
            learner = learner_of(features, case.encoder, case.algorithm)
            sharding = ShardingConfig(sequence=kind if share else "none", sequence_from=LONG_FROM)
            model = ModelConfig(
                events=case.encoder.split(",")[0],  # type: ignore[arg-type]
                event_options=ENCODERS[case.encoder],
            )
            spread_long_events(learner, TrainConfig(model=model, sharding=sharding), ranks)
            for step in ("long", "short"):
                tasks = tasks_of(ranks.rank, ranks.world_size, num_events_T, step)
                batch = batch_without_tasks(features)
                if len(tasks):
                    batch = compose(features, [(block, tasks)])
                name = f"{case.encoder}, {case.algorithm}, {kind}, {step}"
                found[name] = take_step(learner, batch, ranks)
    return found


def refuse_parts(ranks: Ranks, path: str) -> str:
    learner = learner_of(stored(path)[0], "din")
    config = TrainConfig(
        model=ModelConfig(events="din"), sharding=ShardingConfig(sequence="ulysses")
    )
    spread_long_events(learner, config, ranks)
    sharded = ShardedLearner(nn.Identity(), learner)
    return catch_message(ConfigError, sharded, MicroBatches(()), 1.0)


@pytest.mark.distributed
def test_a_rank_takes_no_step_in_parts_of_its_own(path: str) -> None:
    assert on_ranks(1, refuse_parts, path) == [
        "sharding.sequence has all ranks take part in a step at once, and the data-shard service "
        "has this one take its tasks in parts. Set the service's controller.max_micro_batch = 0, "
        'or sharding.sequence = "none"'
    ]


def take_step(learner: MetaLearner, batch: TaskBatch, ranks: Ranks) -> dict[str, Any]:
    """The loss and all gradients, added over ranks, what this rank sent, and its predictions."""
    table, place_U = fetched(batch)
    table.requires_grad_()
    learner.zero_grad()
    episodes = learner.collate(batch)
    with counted_messages() as sent:
        loss = learner(table[place_U], episodes, 1.0)
        loss.backward()
    grads = {name: one.grad for name, one in learner.named_parameters()}
    found = {"table": table.grad, **grads}
    assert all(one is not None for one in found.values()) or not learner.shares_events
    summed = {
        name: torch.zeros(()) if one is None else one.clone() for name, one in found.items()
    } | {"loss": loss.detach()}
    for one in summed.values():
        dist.all_reduce(one)
    predicted = learner.predict(table[place_U].detach(), learner.collate_to_predict(batch))
    of_tasks = predicted.after_N.split(predicted.layout.lengths_T.tolist())
    after = dict(zip(batch.task_T.tolist(), of_tasks, strict=True))
    return {"sums": summed, "sent": sent.take(), "after": after}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    columns = log()
    share = 1 / np.arange(1.0, NUM_USERS + 1)
    rng = np.random.default_rng(3)
    columns["user"] = rng.choice(NUM_USERS, len(columns["user"]), p=share / share.sum())
    body = schema(dense=[{"column": "number", "standardise": True}])
    return prepared(tmp_path_factory.mktemp("long"), columns, body)


@pytest.fixture(scope="module")
def alone(path: str) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(1, step_on_rank, path, False)[0]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_that_share_long_events_take_the_step_of_one(
    path: str, alone: dict[str, Any], world_size: int
) -> None:
    by_rank = on_ranks(world_size, step_on_rank, path, True)
    assert len(by_rank[0]) >= len(alone) - 2
    _, _, num_events_T = stored(path)
    # Several powers of two, and the short ones.
    assert {int(one).bit_length() for one in num_events_T} >= {4, 5, 6, 7, 8}
    for name, first in by_rank[0].items():
        for what, one in alone[name]["sums"].items():
            difference = (first["sums"][what] - one).abs().max()
            assert difference <= 1e-9 * one.abs().max().clamp_min(1), (name, what)
        after = {task: each for one in by_rank for task, each in one[name]["after"].items()}
        assert after.keys() == alone[name]["after"].keys()
        for task, each in alone[name]["after"].items():
            assert (after[task] - each).abs().max() <= 1e-10
        sent = [one[name]["sent"] for one in by_rank]
        # Every rank has its slice of tasks that the last one owns; without one nothing travels.
        assert all(sent) if world_size > 1 and name.endswith("long") else not any(sent)


@pytest.mark.distributed
def test_a_run_that_shares_long_events_is_evaluated_alike_by_one_rank_and_two(
    path: str, tmp_path: Path
) -> None:
    config, run = tmp_path / "train.toml", tmp_path / "run"
    config.write_text("")
    succeed(
        "train", "--nproc-per-node", "2", config, f"data.path={path}", "data.tasks_per_step=16",
        "data.valid_split=train", "model.name=melu", "model.hidden=[8]", "model.embedding_dim=4",
        "model.events=sasrec", "algorithm.inner_lr=0.5", "run.max_steps=2", "run.device=cpu",
        f"run.dir={run}", "sharding.sequence=ulysses", f"sharding.sequence_from={LONG_FROM}",
    )  # fmt: skip
    values = []
    for num_ranks in ("1", "2"):
        done = evaluate("--nproc-per-node", num_ranks, run, "--split", "train")
        assert done.returncode == 0, done.stderr
        assert re.search(r"the best logloss of \d\d settings", done.stdout)  # each reads events
        (group,) = json.loads((run / "evaluation" / "evaluation.json").read_text())["groups"]
        values.append([one["metrics"]["logloss"]["value"] for one in group["results"]])
    assert len(values[0]) == 2
    assert values[0] == pytest.approx(values[1], abs=1e-6)


REST = 'or set sharding.sequence = "none"'


def test_what_no_rank_can_share_is_refused() -> None:
    ring = ShardingConfig(sequence="ring")
    assert check_sequences(ShardingConfig(), "none", 3) is None
    assert check_sequences(ring, "hstu", 1) is None
    shared = 'sharding.sequence = "ring" has ranks share a long task\'s events'
    assert catch_message(ConfigError, check_sequences, ring, "none", 1) == (
        f'{shared}, and model.events = "none" reads none. Choose sasrec, hstu or din, {REST}'
    )
    assert catch_message(ConfigError, check_sequences, ring, "sim", 1) == (
        f'{shared}, and model.events = "sim" attends only to the few that its search finds. '
        f"Choose sasrec, hstu or din, {REST}"
    )
    assert catch_message(ConfigError, check_sequences, ring, "din", 2) == (
        f"{shared} in each step, and outer.accumulate_steps = 2 cuts a step into parts that ranks "
        f"take apart from each other. Set it to 1, {REST}"
    )
