"""A model of one's own with dropout: own draws by rank and step in training, off elsewhere."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.runs.build import build_learner
from gmeta.training import train
from gmeta_models import MODELS, InputSizes, ModelConfig, RowInputs
from tests.distributed.harness import on_ranks
from tests.support import reference
from tests.support.increments import write_increments

FEATURES = reference.some_features(2, 0, 1)
DRAWN: list[list[float]] = []  # what dropout left of 16 ones, forward by forward


class Dropping(nn.Module):
    """Half of each row's inputs, and a layer over them."""

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()  # as a part that is no longer trained
        self.output = nn.Linear(sizes.side_by_side(config.embedding_dim), 1)

    def forward(self, inputs: RowInputs) -> Tensor:
        """Return one output for each row: [N]."""
        if self.training:
            DRAWN.append(self.dropout(torch.ones(16)).tolist())
        rows_NX = self.dropout(inputs.pooled("mean").side_by_side_NX())
        output_N: Tensor = self.output(rows_NX).squeeze(1)
        return output_N


def twice_on_rank(ranks: Ranks) -> dict[str, list[Any]]:
    """Predictions and losses, each of them twice, and the predictions once more."""
    MODELS["dropping"] = Dropping
    model = ModelConfig(name="dropping", embedding_dim=4)
    learner = build_learner(FEATURES, model, AlgorithmConfig(inner_lr=0.1), "mse")
    sharded = shard_learner(learner, FEATURES, TrainConfig(model=model), ranks)
    rng = random.Random(0)
    batch = reference.batch_of([reference.random_task(FEATURES, 4, 9, rng)], FEATURES).map(
        lambda part: part.float() if part.is_floating_point() else part
    )
    asked = learner.collate_to_predict(batch)

    def predicted() -> list[list[float]]:
        found = sharded.local.predict(asked)
        return [found.before_N.tolist(), found.after_N.tolist()]

    scores = [predicted() for _ in range(2)]
    losses = [float(sharded(learner.collate(batch), 1.0)) for _ in range(2)]
    modes = [learner.model.dropout.training, learner.model.frozen.training]
    return {"scores": [*scores, predicted()], "losses": losses, "modes": modes}


@pytest.mark.distributed
def test_dropout_is_off_where_a_model_is_scored_and_on_where_it_learns() -> None:
    (found,) = on_ranks(1, twice_on_rank)
    first, *others = found["scores"]
    assert others == [first, first]
    assert found["losses"][0] != found["losses"][1]
    assert found["modes"] == [True, False]


def drawn_on_rank(ranks: Ranks, configs: list[TrainConfig]) -> list[list[list[float]]]:
    """What dropout left in each of these runs."""
    MODELS["dropping"] = Dropping
    found = []
    for config in configs:
        DRAWN.clear()
        train(config, ranks)
        found.append(list(DRAWN))
    return found


@pytest.mark.distributed
def test_ranks_and_steps_draw_apart_and_a_resumed_run_alike(tmp_path: Path) -> None:
    data = write_increments(tmp_path / "shop")[0]

    def run(name: str, steps: int) -> TrainConfig:
        return config_from_dict(
            {
                "data": {"path": str(data), "tasks_per_step": 16},
                "model": {"name": "dropping", "embedding_dim": 4},
                "run": {"dir": str(tmp_path / name), "device": "cpu", "max_steps": steps},
            }
        )

    whole, *parts = run("whole", 3), run("parts", 1), run("parts", 3)
    first, second = on_ranks(2, drawn_on_rank, [whole, *parts])
    for straight, begun, resumed in (first, second):
        assert min(len(begun), len(resumed)) > 0
        assert begun + resumed == straight
        assert len(set(map(tuple, straight))) == len(straight)
    assert not {tuple(one) for one in first[0]} & {tuple(one) for one in second[0]}
