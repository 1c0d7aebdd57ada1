"""Ridge equals ridge regression task by task, and its gradient the one through that solution."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gmeta.adaptation import closed_form
from gmeta.adaptation.closed_form import LayerGradients, grad_and_hessian_N, solve_TS
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.losses.row_losses import LossFunction
from gmeta.platform.numerics import autocast
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.adaptation.agreement import assert_equals_loop
from tests.support import reference
from tests.support.refusals import catch_message

RIDGE = AlgorithmConfig(name="ridge", inner_lr=0.2)
SIZES = [(3, 2), (0, 2), (4, 0), (7, 3), (1, 1)]
MODELS = {
    "melu": ModelConfig(name="melu", embedding_dim=3, hidden=(4, 3)),
    "dlrm": ModelConfig(name="dlrm", embedding_dim=3, hidden=(4,), options={"bottom": (3,)}),
    "cbml": ModelConfig(name="cbml", embedding_dim=3, hidden=(4,), options={"bottom": (3,)}),
    "din": ModelConfig(
        name="din", embedding_dim=3, hidden=(4,), options={"history": "m0", "attention": (3,)}
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_a_solved_step_and_its_gradient_are_those_of_the_loop(model: str, loss: str) -> None:
    assert_equals_loop(SIZES, (2, 1, 2), MODELS[model], RIDGE, loss)


@pytest.mark.parametrize(
    "changed",
    [
        {"inner_steps": 2},
        {"adapt_layers": ("decision.*4",)},  # R2-D2: the last layer alone
        {"bias_rate": 4.0},
        {"support_prior": 3.0},
        {"inner_lr": 50.0},
        {"layer_paths": ("*=materialised",)},
    ],
    ids=str,
)
def test_whatever_the_config_says_of_it(changed: dict[str, object]) -> None:
    algorithm = replace(RIDGE, **changed)
    assert_equals_loop(SIZES, (2, 1, 2), MODELS["melu"], algorithm, "bce")


def test_tasks_are_solved_a_few_at_a_time_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "MOST_ENTRIES", 100)  # two of seven rows
    assert_equals_loop(SIZES, (2, 1, 2), MODELS["melu"], RIDGE, "bce")
    monkeypatch.setattr(closed_form, "MOST_ENTRIES", 1)
    assert_equals_loop(SIZES, (2, 1, 2), MODELS["din"], RIDGE, "bce")


def predicted(loss: str, rate: float) -> Tensor:
    """The outputs of a small model behind a solved step."""
    features = reference.some_features(2, 1, 2)
    tasks = [reference.random_task(features, 5, 3, random.Random(1)) for _ in range(2)]
    batch = reference.batch_of(tasks, features)
    torch.manual_seed(3)
    algorithm = replace(RIDGE, inner_lr=rate)
    learner = build_learner(features, MODELS["melu"], algorithm, loss).to(torch.float64)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 3, dtype=torch.float64)
    return learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N


def test_mae_adapts_as_half_the_squared_error() -> None:
    torch.testing.assert_close(predicted("mae", 0.4), predicted("mse", 0.2))


def test_a_tiny_rate_is_a_gradient_step_and_a_huge_one_fits_the_support_rows() -> None:
    features = reference.some_features(2, 1, 2)
    task = reference.random_task(features, 3, 3, random.Random(1))
    # Query rows that are the support rows.
    again = [*range(3), *range(3)]
    task = replace(
        task, single=[task.single[row] for row in again], multi=[task.multi[row] for row in again],
        dense=[task.dense[row] for row in again], label=[task.label[row] for row in again],
    )  # fmt: skip
    batch = reference.batch_of([task], features)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 3, dtype=torch.float64)

    def after(algorithm: AlgorithmConfig) -> Tensor:
        torch.manual_seed(3)
        learner = build_learner(features, MODELS["melu"], algorithm, "mse").to(torch.float64)
        return learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N

    def step(rate: float) -> AlgorithmConfig:
        # Its loss is the mean of the three rows, ridge's their sum.
        return AlgorithmConfig(name="maml", inner_lr=3 * rate, adapt_embeddings=False)

    tiny = 1e-6
    torch.testing.assert_close(after(replace(RIDGE, inner_lr=tiny)), after(step(tiny)), atol=1e-9,
                               rtol=0)  # fmt: skip
    # In the last layer alone the outputs are what is solved for.
    fitted = after(replace(RIDGE, inner_lr=1e9, adapt_layers=("decision.*4",)))
    torch.testing.assert_close(fitted, torch.tensor(task.label[:3], dtype=torch.float64))


def test_in_bf16_rows_that_are_much_alike_are_solved_as_in_float64() -> None:
    torch.manual_seed(4)
    rows, inputs, outputs = 100, 64, 16
    alike = [
        torch.randn(1, 1, width, dtype=torch.float64)
        + 0.01 * torch.randn(1, rows, width, dtype=torch.float64)
        for width in (inputs, outputs)
    ]
    slope_TS = torch.randn(1, rows, dtype=torch.float64)
    bend_TS = torch.full_like(slope_TS, 0.25)
    exact = solve_TS([LayerGradients(*alike, 1.0)], slope_TS, bend_TS, 0.5)
    layer = LayerGradients(*(factor.float() for factor in alike), 1.0)
    with autocast("bf16", torch.device("cpu")):
        found = solve_TS([layer], slope_TS.float(), bend_TS.float(), 0.5)
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_huber_bends_everywhere_as_around_0() -> None:
    output_N, label_N = torch.tensor([0.0, 0.5, 9.0]), torch.tensor([0.2, 0.0, 0.0])
    slope_N, bend_N = grad_and_hessian_N(LossFunction("huber", 1.0), output_N, label_N)
    torch.testing.assert_close(slope_N, torch.tensor([-0.2, 0.5, 1.0]))
    torch.testing.assert_close(bend_N, torch.ones(3))


def test_a_loss_of_rows_together_or_of_several_labels_is_refused() -> None:
    features = reference.some_features(2, 1, 2)
    assert catch_message(ValueError, build_learner, features, MODELS["melu"], RIDGE, "softmax") == (
        "algorithm.name = 'ridge' with the loss softmax: its step is solved for one output and a "
        "loss of each row alone. Choose maml, or one label with bce, mse, huber or mae"
    )
    several = replace(features, labels=("click", "buy"))
    assert catch_message(ValueError, build_learner, several, MODELS["melu"], RIDGE, "bce") == (
        "algorithm.name = 'ridge' with 2 labels: its step is solved for one output and a "
        "loss of each row alone. Choose maml, or one label with bce, mse, huber or mae"
    )
