"""A fresh model that starts as the regression of all its dense inputs."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import ItemFeaturesConfig, LabelPrior, SupportFeaturesConfig
from gmeta.data.features.regression import PENALTY, Regression, fit_regression
from gmeta.data.features.support_statistics import SupportStatistics
from gmeta.learner import MetaLearner
from gmeta.losses.row_losses import LossFunction
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.read.batch import TaskBatch
from tests.support.reference import batch_of, random_task, some_features
from tests.support.refusals import catch_message

FEATURES = some_features(2, 1, 1)
PRIOR = LabelPrior(0.3, 0.46)
SUPPORT = SupportFeaturesConfig(task=True, columns=("m0",))
ITEMS = ItemFeaturesConfig(columns=("s*",))
MELU = ModelConfig("melu", embedding_dim=4, hidden=(8, 6), linear_start=True)
ALGORITHMS = ("maml", "fomaml", "anil", "reptile", "metasgd", "ridge", "encoder", "none")

NOT_AS_THEY_ARE = (
    "model.linear_start: a layer has a single unit, or the first does not take dense columns as "
    "they are. Choose melu or din, and two units or more in model.hidden, or leave it out"
)
OF_ONE_LABEL = (
    "model.linear_start is a regression of one label on dense columns and statistics: it needs one "
    "of these inputs at least, and a loss of each row alone. Leave it out"
)


def rows(kind: str, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs of which two do not vary but by rounding and one is far from 0, labels, weights."""
    draws = np.random.default_rng(seed)
    input_NK = draws.normal(size=(400, 4)) * [1.0, 0.01, 30.0, 0.0] + [0.0, 0.0, 500.0, 7.0]
    sum_N = 1.0 + input_NK @ [0.8, -90.0, 0.05, 0.0] - 25.0
    input_NK = np.c_[input_NK, np.linspace(-1e-17, 1e-17, 400)]
    noise_N = draws.standard_t(2, size=400)
    is_click_N = draws.random(400) < 1.0 / (1.0 + np.exp(-sum_N))
    label_N = is_click_N.astype(float) if kind == "bce" else sum_N + noise_N
    return input_NK, label_N, draws.integers(0, 3, 400).astype(float)


@pytest.mark.parametrize("kind", ["mse", "bce", "mae", "huber"])
def test_a_regression_is_the_least_of_its_penalised_loss(kind: str) -> None:
    """At it the gradient is 0, in NumPy; of mae half of the rows lie above."""
    input_NK, label_N, weight_N = rows(kind)
    found = fit_regression(
        LossFunction(kind, 0.7), *map(torch.from_numpy, (input_NK, label_N, weight_N))
    )
    varying_NK, weight_K = input_NK[:, :3], found.weight_K.numpy()[:3]
    assert found.weight_K[3:].tolist() == [0.0, 0.0]
    output_N = found.bias + varying_NK @ weight_K
    mean_K = np.average(varying_NK, axis=0, weights=weight_N)
    deviation_K = np.sqrt(np.average((varying_NK - mean_K) ** 2, axis=0, weights=weight_N))
    mean = np.average(label_N, weights=weight_N)
    deviation = np.sqrt(np.average((label_N - mean) ** 2, weights=weight_N))
    if kind == "mae":
        above_N, below_N = output_N > label_N, output_N < label_N
        assert abs(weight_N[above_N].sum() - weight_N[below_N].sum()) < 0.03 * weight_N.sum()
        return
    if kind == "bce":
        deviation, base = 1.0, np.log(mean / (1.0 - mean))
        grad_N = 1.0 / (1.0 + np.exp(-output_N)) - label_N
    else:
        error_N, base = (output_N - label_N) / deviation, mean
        grad_N = 2.0 * error_N if kind == "mse" else np.clip(error_N, *np.r_[-0.7, 0.7] / deviation)
    input_NX = np.c_[(varying_NK - mean_K) / deviation_K, np.ones(400)]
    at_X = np.r_[weight_K * deviation_K, found.bias + mean_K @ weight_K - base] / deviation
    gradient_X = input_NX.T @ (weight_N * grad_N) + PENALTY * at_X
    np.testing.assert_allclose(gradient_X, 0.0, atol=1e-6)


@pytest.mark.parametrize("click", [0.0, 1.0])
def test_clicks_that_are_all_alike_or_told_apart_have_finite_weights(click: float) -> None:
    input_N1 = torch.linspace(-1, 1, 50, dtype=torch.float64)[:, None]
    loss, ones_N = LossFunction("bce"), torch.ones(50, dtype=torch.float64)
    for label_N in (ones_N * click, (input_N1[:, 0] > 0).double()):
        found = fit_regression(loss, input_N1, label_N, ones_N)
        output_N = found.bias + input_N1[:, 0] * found.weight_K
        assert output_N.abs().max() < 50
        assert ((output_N > 0) == (label_N > 0.5)).all()
    nothing = fit_regression(loss, input_N1[:0], ones_N[:0], ones_N[:0])
    assert np.isfinite(nothing.bias)


def learner(
    loss: str = "bce",
    support: SupportFeaturesConfig = SUPPORT,
    items: ItemFeaturesConfig = ITEMS,
    model: ModelConfig = MELU,
    algorithm: str = "maml",
) -> MetaLearner:
    statistics = SupportStatistics.of(support, FEATURES, PRIOR, items)
    torch.manual_seed(1)
    options = AlgorithmConfig(algorithm, inner_lr=0.1, adapt_embeddings=False)
    return build_learner(FEATURES, model, options, loss, statistics=statistics, item_features=items)


def filled(fresh: MetaLearner, batch: TaskBatch) -> tuple[MetaLearner, torch.Tensor]:
    """The learner that has seen what the rows of the batch say, and that starts as a sum with some
    weights and a bias of 0.4."""
    assert fresh.items is not None
    sums = fresh.items.empty_sums()
    fresh.items.add(sums, batch)
    fresh.items.set_from_sums(sums)
    weight_K = torch.linspace(-1, 2, 10, dtype=torch.float64)
    fresh.start_as(Regression(weight_K, 0.4, 0))
    return fresh, weight_K


def some_batch() -> TaskBatch:
    rng = random.Random(2)
    return batch_of([random_task(FEATURES, *of, rng) for of in ((6, 4), (3, 3), (9, 2))], FEATURES)


def rows_of(batch: TaskBatch) -> torch.Tensor:
    return torch.randn(len(batch.unique_ids_U), 4, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("hidden", [(), (2,), (8, 6)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_fresh_model_is_the_sum_in_every_algorithm(
    algorithm: str, hidden: tuple[int, ...]
) -> None:
    if algorithm == "encoder" and not hidden:
        return  # it moves hidden layers, of which there are none
    batch = some_batch()
    fresh, weight_K = filled(
        learner(model=replace(MELU, hidden=hidden), algorithm=algorithm), batch
    )
    episodes = fresh.collate_to_predict(batch)
    before_N = fresh.predict_along(rows_of(batch), episodes, (0,))[0].before_N
    dense_NK = fresh._without_support(episodes.rows.query).dense_NK  # type: ignore[union-attr]
    assert dense_NK[:, 1:5].any()
    np.testing.assert_allclose(before_N, 0.4 + dense_NK.double() @ weight_K, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_the_fused_loops_first_step_starts_from_it(loss: str) -> None:
    """A rate of nearly 0 leaves the loss of the regression with the inputs of training rows."""
    batch = some_batch()
    config = AlgorithmConfig("maml", inner_lr=1e-12, adapt_embeddings=False)
    statistics = SupportStatistics.of(SUPPORT, FEATURES, PRIOR, ITEMS)
    built = build_learner(FEATURES, MELU, config, loss, statistics=statistics, item_features=ITEMS)
    fresh, weight_K = filled(built, batch)
    assert fresh.route == "fused"
    found = fresh(rows_of(batch), fresh.collate(batch), 1.0)
    told = fresh.collate_options().with_features(batch)
    wanted, output_N = 0.0, (0.4 + told.dense_NK.double() @ weight_K).numpy()
    label_N = batch.label_N.double().numpy()
    begin_T = batch.row_offsets_T1[:-1] + batch.support_lengths_T
    for begin, end in zip(begin_T.tolist(), batch.row_offsets_T1[1:].tolist(), strict=True):
        z_N, y_N = output_N[begin:end], label_N[begin:end]
        losses_N = np.log1p(np.exp(z_N)) - y_N * z_N if loss == "bce" else (z_N - y_N) ** 2
        wanted += losses_N.mean()
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_every_layer_learns_from_there() -> None:
    batch = some_batch()
    fresh, _ = filled(learner(), batch)
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
        ({"loss": "pairwise"}, OF_ONE_LABEL),
        ({"model": replace(MELU, name="dcnv2")}, NOT_AS_THEY_ARE),
        ({"model": replace(MELU, hidden=(8, 1))}, NOT_AS_THEY_ARE),
    ],
)
def test_what_cannot_start_so_is_told(changed: dict[str, Any], told: str) -> None:
    assert catch_message(ValueError, learner, **changed) == told
