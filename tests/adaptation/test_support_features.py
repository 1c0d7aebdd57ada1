"""Statistics of support rows as inputs of every model and algorithm, by either inner loop."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.config.algorithm import PLAIN, AlgorithmConfig
from gmeta.config.inputs import LabelPrior, SupportFeaturesConfig
from gmeta.data.features.support_statistics import SupportStatistics
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.adaptation.agreement import assert_equals_loop
from tests.support import reference

SUPPORT = SupportFeaturesConfig(task=True, columns=("s0", "m*"))
SIZES = [(4, 2), (0, 3), (1, 1), (3, 0), (6, 4)]
MODELS = {
    name: ModelConfig(
        name, 4, hidden=(5, 3), options={"bottom": (3,), "history": "m0", "attention": (6,)}
    )
    for name in ("melu", "dlrm", "cbml", "din")
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["none", "maml", "fomaml", "reptile", "metasgd"])
@pytest.mark.parametrize("num_dense", [0, 2])
def test_a_step_equals_the_loop_with_dense_columns(model: str, name: str, num_dense: int) -> None:
    algorithm = AlgorithmConfig(name, inner_steps=2, adapt_embeddings=num_dense == 0)
    columns = (2, 2, num_dense)
    assert_equals_loop(SIZES, columns, MODELS[model], algorithm, "mse", support_features=SUPPORT)


@pytest.mark.parametrize("name", ["maml", "none"])
@pytest.mark.parametrize("huber_delta", [0.2, 0.6])
def test_the_bend_of_hubers_loss_is_that_of_both_loops(name: str, huber_delta: float) -> None:
    algorithm = AlgorithmConfig(name, inner_steps=3, inner_lr=0.2, adapt_embeddings=False)
    columns = (2, 1, 1)
    assert_equals_loop(SIZES, columns, MODELS["melu"], algorithm, "huber", huber_delta=huber_delta)


@pytest.mark.parametrize("name", [*ALGORITHMS, PLAIN])
def test_before_adaptation_a_model_knows_nothing_of_the_support(name: str) -> None:
    """What it predicts first is what it predicts of a task without support rows."""
    features = reference.some_features(2, 2, 1)
    statistics = SupportStatistics.of(SUPPORT, features, LabelPrior(0.4, 0.5))
    torch.manual_seed(3)
    own: dict[str, Any] = {}
    if name == "metaemb":
        own = {"adapt_embeddings": ("s0",), "options": {"content": ("s1",)}}
    algorithm = AlgorithmConfig(name, **own)
    learner = build_learner(features, MODELS["melu"], algorithm, "mse", 1.0, statistics).double()
    rng = random.Random(1)
    tasks = [reference.random_task(features, 5, 4, rng) for _ in range(3)]
    unknown = [
        replace(
            task, single=task.single[5:], multi=task.multi[5:], dense=task.dense[5:],
            label=task.label[5:], num_support=0,
        )
        for task in tasks
    ]  # fmt: skip
    tables = [torch.randn(table.num_rows, 4, dtype=torch.float64) for table in features.tables]
    found = []
    for episodes in (tasks, unknown):
        batch = reference.batch_of(episodes, features)
        ids = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
        rows_UD = torch.cat([table[mine] for table, mine in zip(tables, ids, strict=True)])
        found.append(learner.predict(rows_UD, learner.collate_to_predict(batch)))
    known, without = found
    torch.testing.assert_close(known.before_N, without.before_N, rtol=0, atol=1e-12)
    torch.testing.assert_close(known.before_N, without.after_N, rtol=0, atol=1e-12)
    assert float((known.after_N - known.before_N).abs().max()) > 1e-3
