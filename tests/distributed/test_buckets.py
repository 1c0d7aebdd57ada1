"""Training in few shapes (run.shape_buckets) against training without, on 1 rank and on 2."""

import random
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import _choose_shapes, shard_learner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_equals_reference import local_rows
from tests.support import reference

MODEL = ModelConfig(name="melu", embedding_dim=4, hidden=(5, 4))
FEATURES = reference.some_features(2, 1, 1)
ALGORITHMS = {
    "maml": AlgorithmConfig(name="maml", adapt_embeddings=True, inner_steps=2),
    "fomaml": AlgorithmConfig(name="fomaml", adapt_embeddings=False),
    "metasgd": AlgorithmConfig(name="metasgd", adapt_embeddings=False),
}


def tasks_of_steps() -> list[list[reference.Task]]:
    rng = random.Random(4)
    return [
        [
            reference.random_task(FEATURES, rng.randint(1, 11), rng.randint(0, 9), rng)
            for _ in range(number)
        ]
        for number in (9, 10, 1)  # the second of two ranks has no task in the last step
    ]


def train_on_rank(ranks: Ranks) -> dict[tuple[str, str], Any]:
    return {
        (name, buckets): trained(ranks, name, buckets)
        for name in ALGORITHMS
        for buckets in ("on", "off")
    }


def trained(ranks: Ranks, algorithm: str, buckets: str) -> dict[str, Any]:
    """Rows and layers after the steps, and how many rows the fast loop's batches were made for."""
    config = TrainConfig(
        model=MODEL,
        outer=OuterConfig(dense_optimizer="sgd", sparse_optimizer="adagrad"),
        run=RunConfig(seed=1, shape_buckets=buckets),
    )
    torch.manual_seed(3)
    learner = build_learner(FEATURES, MODEL, ALGORITHMS[algorithm], "bce")
    sharded = shard_learner(learner, FEATURES, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    batches = (
        reference.batch_of(tasks[ranks.rank :: ranks.world_size], FEATURES)
        for tasks in tasks_of_steps()
    )
    sizes = []
    steps = steps_of(batches, learner.collate, FEATURES, ranks, sharded=sharded)
    for step, (episodes, totals) in enumerate(steps):
        optimizer.begin_step(step, 3)
        sharded(episodes, ranks.world_size / totals.num_terms).backward()
        optimizer.step()
        sizes.append(episodes.num_fetched)
    layers = {name: value.detach().clone() for name, value in learner.named_parameters()}
    return {"tables": local_rows(sharded), "layers": layers, "sizes": sizes}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_runs_in_few_shapes_train_the_same_model(world_size: int) -> None:
    for of_rank in on_ranks(world_size, train_on_rank):
        for name in ALGORITHMS:
            on, off = of_rank[name, "on"], of_rank[name, "off"]
            assert (any(on["sizes"]), any(off["sizes"])) == (True, False)
            assert list(on["layers"]) == list(off["layers"])
            for one, other in zip(on["layers"].values(), off["layers"].values(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(on["tables"], off["tables"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("buckets", "expected"), [("auto", False), ("off", False), ("on", True)])
def test_on_a_cpu_shapes_are_as_asked_and_steps_eager_and_the_log_says_why(
    buckets: str, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    learner = build_learner(FEATURES, MODEL, ALGORITHMS["maml"], "bce")
    ranks: Any = SimpleNamespace(device=torch.device("cpu"), rank=0)
    _choose_shapes(learner, RunConfig(shape_buckets=buckets, cuda_graphs="on"), ranks)
    assert (learner.in_buckets, learner._graphs) == (expected, None)
    wanted = ["run.cuda_graphs: steps are taken eagerly, as this run computes on the CPU"]
    assert caplog.messages == wanted


@pytest.mark.parametrize(
    ("device", "graphs", "expected"),
    [("cuda", "auto", True), ("cuda", "off", False), ("cpu", "auto", False)],
)
def test_steps_are_graphs_where_they_can_be_and_nothing_is_told_unless_asked_for(
    device: str, graphs: Literal["auto", "off"], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    learner = build_learner(FEATURES, MODEL, ALGORITHMS["maml"], "bce")
    ranks: Any = SimpleNamespace(device=torch.device(device), rank=0)
    _choose_shapes(learner, RunConfig(cuda_graphs=graphs), ranks)
    assert (learner.in_buckets, learner._graphs is not None) == (device == "cuda", expected)
    assert caplog.messages == []
