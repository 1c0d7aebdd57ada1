"""Losses of a package of one's own: the same as the loop over rows, in both inner loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gmeta.adaptation.closed_form import grad_and_hessian_N
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.labels import LabelsConfig
from gmeta.config.losses import CustomLoss, kind_of_loss
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.errors import ConfigError
from gmeta.losses.custom_loss_check import check_custom_loss
from gmeta.losses.named_losses import make_objectives
from gmeta.losses.row_losses import LossFunction, row_grads_N, row_losses_N
from gmeta.runs.build import build_learner
from gmeta.runs.early_stop import make_early_stop
from tests.adaptation.agreement import assert_equals_loop
from tests.losses.test_objectives import ALGORITHMS, MODELS, Labelled
from tests.support import reference
from tests.support.refusals import catch_message

HERE = __name__
SIZES = [(3, 2), (1, 4), (4, 0), (0, 2)]


def focal(output_N: Tensor, label_N: Tensor) -> Tensor:
    """Lin et al., arXiv 1708.02002, with gamma 2."""
    cross_entropy_N = F.binary_cross_entropy_with_logits(output_N, label_N, reduction="none")
    return (label_N - output_N.sigmoid()).square() * cross_entropy_N


def log_cosh(output_N: Tensor, label_N: Tensor) -> Tensor:
    return torch.log(torch.cosh(output_N - label_N))


def plain_bce(output_N: Tensor, label_N: Tensor) -> Tensor:
    return F.softplus(output_N, threshold=50.0) - output_N * label_N


FOCAL = CustomLoss(focal, "probability")
LOG_COSH = CustomLoss(log_cosh, "rating")
PLAIN_BCE = CustomLoss(plain_bce, "probability")
WRITTEN_OUT = CustomLoss(
    plain_bce, "probability", lambda output_N, _: output_N.sigmoid() * (-output_N).sigmoid()
)
NAMES = ("click", "buy", "stars")
CONFIG = LabelsConfig(
    loss={"click": f"{HERE}:FOCAL", "buy": f"{HERE}:FOCAL", "stars": f"{HERE}:LOG_COSH"},
    weight={"buy": 3.0, "stars": 0.25}, adapt=("click", "stars"), entire_space={"buy": "click"},
)  # fmt: skip


def slow_loss(config: LabelsConfig, names: tuple[str, ...], outer: str) -> reference.RowLoss:
    """The loss of a row, label by label, written with probabilities and exponentials."""

    def of_label(at: int, outputs_L: Tensor, label: float) -> Tensor:
        name = names[at]
        if config.loss.get(name, outer).endswith("LOG_COSH"):
            error = outputs_L[at] - label
            return ((error.exp() + (-error).exp()) / 2).log()
        p = torch.sigmoid(outputs_L[at])
        while name in config.entire_space:
            name = config.entire_space[name]
            p = p * torch.sigmoid(outputs_L[names.index(name)])
        return -label * (1 - p) ** 2 * p.log() - (1 - label) * p**2 * (1 - p).log()

    def row_loss(output: Tensor, task: reference.Task, rows: range, is_inner: bool) -> Tensor:
        losses = []
        for outputs, row in zip(output.reshape(len(rows), len(names)), rows, strict=True):
            total = outputs.sum() * 0.0
            labels = np.reshape(task.label[row], -1).tolist()
            for at, (name, label) in enumerate(zip(names, labels, strict=True)):
                if not math.isnan(label) and not (is_inner and name not in (config.adapt or names)):
                    total = total + config.weight.get(name, 1.0) * of_label(at, outputs, label)
            losses.append(total if task.weight is None else total * task.weight[row])
        return torch.stack(losses) if losses else output.new_zeros(0)

    return row_loss


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("model", ["melu", "dlrm", "cbml", "mmoe"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_several_labels_masks_and_weights_learn_as_in_the_loop(
    name: str, model: str, embeddings: bool
) -> None:
    algorithm = AlgorithmConfig(
        name=name, inner_steps=2, adapt_embeddings=embeddings, support_prior=0.5
    )
    labelled = Labelled(NAMES, 0.4, True)
    slow = slow_loss(CONFIG, NAMES, "")
    assert_equals_loop(
        SIZES, (2, 1, 2), MODELS[model], algorithm, labels=(CONFIG, labelled, slow)
    )  # fmt: skip


@pytest.mark.parametrize("outer", ["FOCAL", "LOG_COSH"])
@pytest.mark.parametrize("model", ["melu", "din", "deepfm"])
def test_one_label_learns_as_in_the_loop(outer: str, model: str) -> None:
    algorithm, loss = AlgorithmConfig(name="maml", inner_steps=3), f"{HERE}:{outer}"
    labels = LabelsConfig(), Labelled(("y",), 0.3, True), slow_loss(LabelsConfig(), ("y",), outer)
    assert_equals_loop(SIZES, (2, 1, 2), MODELS[model], algorithm, loss, labels=labels)


@pytest.mark.parametrize("own", ["PLAIN_BCE", "WRITTEN_OUT"])
@pytest.mark.parametrize("name", [*ALGORITHMS, "ridge", "encoder"])
def test_a_copy_of_ours_takes_the_same_step(own: str, name: str) -> None:
    features = reference.some_features(2, 1, 2)
    batch = reference.batch_of([reference.random_task(features, 5, 3, seeded) for seeded in rngs()],
                               features)  # fmt: skip

    def found(loss: str) -> list[Tensor]:
        torch.manual_seed(0)
        config = AlgorithmConfig(name=name, inner_steps=2, inner_lr=0.2)
        learner = build_learner(features, MODELS["melu"], config, loss).double()
        torch.manual_seed(1)
        rows_UD = torch.randn(len(batch.unique_ids_U), 4, dtype=torch.float64, requires_grad=True)
        total = learner(rows_UD, learner.collate(batch), weight=1.0)
        predicted = learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N
        wanted = [rows_UD, *learner.parameters()]
        grads = torch.autograd.grad(total, wanted, materialize_grads=True)
        return [total, predicted, *grads]

    for mine, ours in zip(found(f"{HERE}:{own}"), found("bce"), strict=True):
        torch.testing.assert_close(mine, ours, rtol=1e-10, atol=1e-10)


def rngs() -> list:  # type: ignore[type-arg]
    import random

    return [random.Random(seed) for seed in range(3)]


def test_a_curvature_below_0_counts_as_none() -> None:
    loss, label_N = LossFunction("bce", own=FOCAL), torch.tensor([1.0, 1.0], dtype=torch.float64)
    output_N = torch.tensor([-6.0, 0.5], dtype=torch.float64, requires_grad=True)
    slope_N, curve_N = grad_and_hessian_N(loss, output_N, label_N)
    (own_slope_N,) = torch.autograd.grad(
        focal(output_N, label_N).sum(), output_N, create_graph=True
    )
    (own_curve_N,) = torch.autograd.grad(own_slope_N.sum(), output_N)
    torch.testing.assert_close(slope_N, own_slope_N)
    assert own_curve_N[0] < 0 < own_curve_N[1]
    assert curve_N.tolist() == [0.0, own_curve_N[1].item()]


def test_slopes_are_constants_where_no_gradient_is_taken() -> None:
    loss, label_N = LossFunction("bce", own=FOCAL), torch.tensor([1.0, 0.0])
    with torch.no_grad():
        slope_N = row_grads_N(loss, torch.tensor([0.3, -2.0]), label_N)
    assert not slope_N.requires_grad
    seen_N = torch.tensor([0.3, -2.0], requires_grad=True)
    row_losses_N(loss, seen_N, label_N).sum().backward()
    torch.testing.assert_close(slope_N, seen_N.grad)


@pytest.mark.parametrize(
    ("function", "end"),
    [
        (lambda o, y: o.mean(), "makes losses of shape [] of 18 rows. Return a tensor of [18]"),
        (lambda o, y: 3, "makes losses 3 of 18 rows. Return a tensor of [18]"),
        (lambda o, y: (o - y).detach(), "has no gradient. Leave out .detach(), .item() and "
         "torch.no_grad()"),
        (lambda o, y: (o - o.mean()) ** 2, "of a row changes with other rows. Make it of each row "
         "alone"),
        (lambda o, y: y.log() * o, "makes losses inf for the output -8 and the label 0. Make it "
         "finite there"),
        (lambda o, y: (o - y).abs().sqrt(), "makes slopes nan for the output 0 and the label 0. "
         "Make it finite there"),
        (lambda o, y: 1 / 0, "fails: ZeroDivisionError: division by zero. Make it of torch "
         "operations that can be differentiated twice"),
    ],
)  # fmt: skip
def test_what_is_no_loss_of_a_row_is_refused(function: object, end: str) -> None:
    own = CustomLoss(function, "rating")  # type: ignore[arg-type]
    told = catch_message(ConfigError, check_custom_loss, "my:L", own)
    assert told == f"the loss 'my:L' {end} (docs/extending.md)"


def test_a_curvature_of_ones_own_is_tried_too() -> None:
    own = replace(FOCAL, curvature=lambda output_N, label_N: -torch.ones_like(output_N))
    told = catch_message(ConfigError, check_custom_loss, "my:L", own)
    assert told.startswith("the loss 'my:L' makes the curvature -1. Return none below 0")


def fail(output_N: Tensor, label_N: Tensor) -> Tensor:
    if len(output_N) != 18:  # those that it is tried on
        raise ValueError("too\nmany")
    return log_cosh(output_N, label_N)


def test_a_loss_that_fails_later_is_one_line() -> None:
    loss = LossFunction("mse", own=CustomLoss(fail, "rating"))
    told = catch_message(ConfigError, row_losses_N, loss, torch.zeros(2), torch.zeros(2))
    assert told == (
        "fail of outer.loss fails: ValueError: too many. Mend it; --verbose shows the line"
    )


def test_what_it_predicts_decides_on_labels_metrics_and_units() -> None:
    assert kind_of_loss(f"{HERE}:FOCAL") == "bce"
    assert kind_of_loss(f"{HERE}:LOG_COSH") == "mse"
    losses = make_objectives("bce", 1.0, CONFIG, NAMES).outer
    predicted = losses.predictions(torch.zeros(1, 3))
    assert predicted.tolist() == [[0.5, 0.5, 0.0]]
    rated = config_from_dict({"outer": {"loss": f"{HERE}:LOG_COSH"}})
    assert make_early_stop(rated).metric == "mae"
    assert make_early_stop(config_from_dict({"outer": {"loss": f"{HERE}:FOCAL"}})).metric == "auc"
    assert TrainConfig(labels=CONFIG).loss_names == ["bce", f"{HERE}:FOCAL", f"{HERE}:LOG_COSH"]


@pytest.mark.parametrize(
    ("raw", "end"),
    [
        ({"outer": {"loss": "hubber"}}, "outer.loss = 'hubber' is unknown: known are bce, huber, "
         "mae, mse, pairwise, softmax. Did you mean 'huber'? Choose one of them, or name yours as "
         "package.module:Name (docs/extending.md)"),
        ({"outer": {"loss": 3}}, "outer.loss = 3 is not allowed: choose one of bce, mse, huber, "
         "mae, softmax, pairwise"),
    ],
)  # fmt: skip
def test_a_name_that_names_nothing_is_refused(raw: dict[str, object], end: str) -> None:
    assert catch_message(ConfigError, config_from_dict, raw) == end


def test_a_value_that_is_no_loss_is_refused() -> None:
    told = catch_message(ConfigError, kind_of_loss, f"{HERE}:focal")
    assert told == (
        f"outer.loss = '{HERE}:focal' is a value of function: a value of "
        "gmeta.config.losses.CustomLoss is needed. Name that (docs/extending.md)"
    )
