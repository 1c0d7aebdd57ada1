"""What `gmeta plan` tells of long tasks, against what a step of two ranks sends and keeps."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import SequenceKind, ShardingConfig
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.long_events import spread_long_events
from gmeta.distributed.sequence.plan_events import estimate_long_events
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio import open_dataset
from metaio.read.compose import compose
from tests.distributed.harness import on_ranks
from tests.distributed.sequence.messages import counted_messages, counted_saved
from tests.metaio.prepare.test_events import prepared, schema

ROWS, RANKS = 20, 2
CASES: tuple[tuple[str, dict[str, Any], SequenceKind], ...] = (
    ("sasrec", {}, "ulysses"),
    ("sasrec", {}, "ring"),
    ("sasrec", {"attention": "linear"}, "ring"),
    ("hstu", {}, "ulysses"),
    ("hstu", {}, "ring"),
    ("din", {}, "ring"),
)


@dataclass
class CountingEvents:
    """What long tasks share, with the bytes that it keeps for gradients."""

    within: Any
    weights: list[torch.Tensor]
    kept: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.within, name)

        def count(*values: Any) -> Any:
            with counted_saved(self.weights) as saved:
                found = method(*values)
            self.kept.append(sum(saved.values()))
            return found

        return count if name in ("encode", "pool") else method


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tasks of 400 to 1,500 events, of two powers of two."""
    rng = np.random.default_rng(0)
    lengths_T = rng.integers(400, 1_500, 16)
    num_rows = int(lengths_T.sum())
    columns = {
        "user": np.repeat(np.arange(len(lengths_T)), lengths_T),
        "item": rng.integers(1, 90, num_rows),
        "kind": rng.integers(1, 6, num_rows),
        "number": rng.normal(size=num_rows),
        "click": rng.integers(0, 2, num_rows),
        "time": np.arange(num_rows),
    }
    episodes = {
        "by": "last", "query_rows": 10, "min_rows": 11, "max_rows": ROWS, "longer": "truncate",
    }  # fmt: skip
    body = schema(episodes=episodes, splits={"shares": {"train": 1.0}})
    return prepared(tmp_path_factory.mktemp("plan"), columns, body)


def step_on_rank(ranks: Ranks, path: str) -> list[dict[str, float]]:
    """Bytes that this rank sends and keeps, of each case, and what the plan of the step says."""
    dataset = open_dataset(path)
    block, found = dataset.read_block("train", 0), []
    every = np.arange(block.num_episodes)
    events_T = compose(dataset.features, [(block, every)]).num_events_T.tolist()
    batch = compose(dataset.features, [(block, every[ranks.rank :: ranks.world_size])])
    for encoder, options, kind in CASES:
        torch.manual_seed(3)
        model = ModelConfig(
            "melu",
            embedding_dim=32,
            events=encoder,
            event_options=options,
            hidden=(8,),  # type: ignore[arg-type]
        )
        learner = build_learner(dataset.features, model, AlgorithmConfig(name="none"), "bce")
        events = learner.events
        assert events is not None
        planned = estimate_long_events(events, kind, events_T, ROWS, ranks.world_size)
        sharding = ShardingConfig(sequence=kind, sequence_from=300)
        spread_long_events(learner, TrainConfig(model=model, sharding=sharding), ranks)
        events.over_ranks = counted = CountingEvents(events.over_ranks, [*events.parameters()])
        rows_UD = torch.randn(batch.unique_ids_U.numel(), 32, requires_grad=True)
        with counted_messages() as sent:
            learner(rows_UD, learner.collate(batch), 1.0).backward()
        found.append(
            {
                "planned_sent": planned.sent_bytes, "sent": sent.take(),
                "planned_kept": planned.kept_bytes, "kept": sum(counted.kept),
            }
        )  # fmt: skip
    return found


@pytest.mark.distributed
def test_the_plan_of_long_tasks_is_what_a_step_sends_and_keeps(path: str) -> None:
    by_rank = on_ranks(RANKS, step_on_rank, path)
    for case, of_ranks in zip(CASES, zip(*by_rank, strict=True), strict=True):
        for what in ("sent", "kept"):
            planned = of_ranks[0][f"planned_{what}"]
            measured = max(one[what] for one in of_ranks)
            assert planned == pytest.approx(measured, rel=0.1), (case, what)
