"""A fresh model that starts as the bias model, from the inputs that hold its effects."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import ItemFeaturesConfig, LabelPrior, SupportFeaturesConfig
from gmeta.data.features.support_statistics import SupportStatistics
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.read.batch import TaskBatch
from tests.support.reference import batch_of, random_task, some_features
from tests.support.refusals import catch_message

FEATURES = some_features(2, 1, 1)
PRIOR = LabelPrior(0.3, 0.46)
SUPPORT = SupportFeaturesConfig(task=True, columns=("m0",), residual_of="s1", bias_start=True)
ITEMS = ItemFeaturesConfig(columns=("s*",))
MELU = ModelConfig("melu", embedding_dim=4, hidden=(8, 6))

NOT_AS_THEY_ARE = (
    "support_features.bias_start: a layer has a single unit, or the first does not take dense "
    "columns as they are. Choose melu or din, and two units or more in model.hidden, or "
    "leave it out"
)


def learner(
    loss: str = "bce",
    support: SupportFeaturesConfig = SUPPORT,
    items: ItemFeaturesConfig = replace(ITEMS, log_odds=True),  # noqa: B008 - frozen
    model: ModelConfig = MELU,
) -> MetaLearner:
    statistics = SupportStatistics.of(support, FEATURES, PRIOR, items)
    torch.manual_seed(1)
    algorithm = AlgorithmConfig("maml", inner_lr=0.1, adapt_embeddings=False)
    return build_learner(
        FEATURES, model, algorithm, loss, statistics=statistics, item_features=items
    )


def filled(fresh: MetaLearner, batch: TaskBatch) -> MetaLearner:
    """The learner that has seen what the rows of the batch say of their values."""
    assert fresh.items is not None
    sums = fresh.items.empty_sums()
    fresh.items.add(sums, batch)
    fresh.items.set_from_sums(sums)
    return fresh


def some_batch() -> TaskBatch:
    rng = random.Random(2)
    return batch_of([random_task(FEATURES, *of, rng) for of in ((6, 4), (3, 3), (9, 2))], FEATURES)


def outputs(learner: MetaLearner, batch: TaskBatch) -> tuple[np.ndarray, np.ndarray]:
    """Its predictions of query rows before it adapts, and the dense inputs, statistics last."""
    episodes = learner.collate_to_predict(batch)
    rows_UD = torch.randn(len(batch.unique_ids_U), 4, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        inner = learner.general_loop
        rows = learner._working_rows(rows_UD, episodes)
        query = episodes.rows.query  # type: ignore[union-attr]
        output_N = inner.output_N(inner.unadapted(rows, query), query)
    return output_N.numpy(), query.dense_NK.numpy()


@pytest.mark.parametrize("hidden", [(), (2,), (8, 6)])
@pytest.mark.parametrize("loss", ["bce", "mse", "mae"])
def test_a_fresh_model_is_mean_item_and_task(loss: str, hidden: tuple[int, ...]) -> None:
    batch, is_bce = some_batch(), loss == "bce"
    items, model = replace(ITEMS, log_odds=is_bce), replace(MELU, hidden=hidden)
    fresh = filled(learner(loss, items=items, model=model), batch)
    found_N, dense_NK = outputs(fresh, batch)
    # One column of the data; mean and number of s0, of s1; three of the task; two of m0.
    item_N, task_N = dense_NK[:, 3], dense_NK[:, 5]
    assert item_N.any()
    assert task_N.any()
    if is_bce:
        expected_N = np.log(PRIOR.mean / (1 - PRIOR.mean)) + item_N + task_N
    else:
        expected_N = PRIOR.mean + PRIOR.deviation * (item_N + task_N)
    np.testing.assert_allclose(found_N, expected_N, rtol=1e-5, atol=1e-6)


def test_every_layer_learns_from_there() -> None:
    batch = some_batch()
    fresh = filled(learner(), batch)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    for _ in range(3):  # the last layer's weights come first: the others' gradients go by them
        episodes = fresh.collate(batch)
        rows_UD = torch.randn(len(batch.unique_ids_U), 4)
        before = [one.detach().clone() for one in fresh.parameters()]
        optimizer.zero_grad()
        fresh(rows_UD, episodes, 1.0).backward()
        optimizer.step()
    moved = [
        (one - then).abs().max() > 0 for one, then in zip(fresh.parameters(), before, strict=True)
    ]
    assert all(moved)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"support": replace(SUPPORT, residual_of="")},
            "support_features.bias_start adds up the mean, an item's and a task's: it needs "
            "support_features.task = true, support_features.residual_of and a loss of each row "
            "alone. Set them, or leave it out",
        ),
        (
            {"items": ITEMS},
            "support_features.bias_start with outer.loss = 'bce' needs item_features.log_odds = "
            "true. Set it so",
        ),
        ({"model": ModelConfig("dcnv2", embedding_dim=4, hidden=(8,))}, NOT_AS_THEY_ARE),
    ],
)
def test_what_cannot_start_so_is_told(changed: dict[str, Any], told: str) -> None:
    assert catch_message(ValueError, learner, **changed) == told
