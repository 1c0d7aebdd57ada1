"""Algorithms of somebody's own, made of the parts that those of the registry are made of."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.algorithms.encoder import support_encoder
from gmeta.adaptation.algorithms.maml import QueryLoss
from gmeta.adaptation.algorithms.metasgd import LearnedRates
from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.adaptation.algorithms.reptile import reptile_loss_sum
from gmeta.adaptation.general_loop import GeneralLoop
from gmeta.adaptation.layout.sides import Sides, WorkingRows
from gmeta.adaptation.rates import FixedRates
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner
from gmeta_keys import key
from gmeta_models import MODELS, InputSizes, ModelConfig
from gmeta_models.decision_model import DecisionModel
from gmeta_models.inputs import RowFeatures, RowInputs
from gmeta_models.melu import MeLU
from tests.support import reference
from tests.support.refusals import catch_message

FEATURES = reference.some_features(2, 0, 1)
HIDDEN = {"encoder_hidden": (4,)}
TASKS = [(3, 2), (1, 4), (0, 2)]


def learner_of(
    own: Algorithm, monkeypatch: pytest.MonkeyPatch, model: str = "melu", **keys: object
) -> MetaLearner:
    """A learner of an algorithm and a small model, drawn the same each time."""
    monkeypatch.setitem(ALGORITHMS, "own", own)
    torch.manual_seed(3)
    config = AlgorithmConfig(**{"name": "own", "options": HIDDEN, **keys})  # type: ignore[arg-type]
    sizes = ModelConfig(name=model, embedding_dim=4, hidden=(5, 3))
    return build_learner(FEATURES, sizes, config, "mse").double()


def step(learner: MetaLearner) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of some tasks and all its gradients, those of the fetched rows among them."""
    rng = random.Random(5)
    tasks = [reference.random_task(FEATURES, *sizes, rng) for sizes in TASKS]
    batch = reference.batch_of(tasks, FEATURES)
    torch.manual_seed(7)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    loss = learner(rows_UD, learner.collate(batch), weight=0.5)
    trained = ((name, one) for name, one in learner.named_parameters() if one.requires_grad)
    named = {"rows": rows_UD, **dict(trained)}
    grads = torch.autograd.grad(loss, [*named.values()])  # refuses what the loss does not reach
    return loss.detach(), dict(zip(named, grads, strict=True))


def test_what_an_algorithm_learns_beside_the_model_learns_with_mamls_loss_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Algorithm(QueryLoss(second_order=True), parts=support_encoder)
    learner = learner_of(own, monkeypatch)
    assert learner.route == "general"
    loss, grads = step(learner)
    options = {**HIDDEN, "cold_weight": 0.0}
    # Without a share of the cold loss encoder_maml has the same equations.
    same = learner_of(ALGORITHMS["encoder_maml"], monkeypatch, options=options)
    wanted, wanted_grads = step(same)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(grads, wanted_grads)
    assert grads["encoder.rows.0.weight"].abs().sum() > 0


def test_reptiles_loss_takes_the_rate_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Algorithm(reptile_loss_sum, rates=lambda *_: FixedRates(0.3), learns_from="support")
    wanted = learner_of(ALGORITHMS["reptile"], monkeypatch, inner_lr=0.3)
    for found, right in zip(step(learner_of(own, monkeypatch)), step(wanted), strict=True):
        torch.testing.assert_close(found, right)


def test_reptiles_loss_with_rates_that_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Algorithm(reptile_loss_sum, rates=LearnedRates, learns_from="support")
    learner = learner_of(own, monkeypatch)
    assert catch_message(ConfigError, step, learner) == (
        "Reptile's loss_sum with LearnedRates: theta - theta_t is its gradient only at one "
        "FixedRates for all that adapts. Leave out the algorithm's rates, or give it a loss_sum "
        "of its own"
    )


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda loss: loss.expand(3), "of shape [3]; a scalar is needed, the sum over the tasks"),
        (lambda loss: 0.5, "0.5; a scalar is needed, the sum over the tasks"),
        (torch.detach, "without a gradient; one is needed, so leave out .detach()"),
    ],
)
def test_a_loss_that_nothing_can_learn_from_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[Tensor], Tensor], told: str
) -> None:
    def loss_sum(inner_loop: GeneralLoop, rows: WorkingRows, tasks: Sides) -> Tensor:
        adapted = inner_loop.adapt(rows, tasks, second_order=True)
        return made(inner_loop.query_loss_sum(adapted, tasks))

    learner = learner_of(Algorithm(loss_sum), monkeypatch)
    expected = f"algorithm.name = 'own' makes a loss {told}. Correct its loss_sum"
    assert catch_message(ConfigError, step, learner) == expected


def test_a_loss_that_fails_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_sum(inner_loop: GeneralLoop, rows: WorkingRows, tasks: Sides) -> Tensor:
        return inner_loop.adopt(rows, tasks, True)  # type: ignore[attr-defined]

    assert catch_message(ConfigError, step, learner_of(Algorithm(loss_sum), monkeypatch)) == (
        "algorithm.name = 'own' cannot make its loss: AttributeError: 'GeneralLoop' object has no "
        "attribute 'adopt'. Mend its loss_sum; --verbose shows the line"
    )


RATES = {"decision.0": 0.2, "decision.2": 0.3, "decision.4": 0.1}


class ByLayer:
    """A rate for each layer."""

    def of_layer(self, name: str) -> float:
        return RATES[name]

    def of_rows(self, unique_lengths_B: Tensor, fetched_row_P: Tensor) -> float:
        return 0.0


def by_layer_loss_sum(inner_loop: GeneralLoop, rows: WorkingRows, tasks: Sides) -> Tensor:
    """Reptile with each layer's own rate."""
    longest = tasks.query.layout.longest
    adapted = inner_loop.take_steps(rows, tasks.support, longest, False, keep_path=True)
    pull = rows.values_PD.sum() * 0.0
    path_loss = sum(adapted.support_loss_sums, pull)
    for name, layer in inner_loop.plan.layers.items():
        weights = [*layer.parameters()]
        for weight, grad in zip(
            weights, torch.autograd.grad(path_loss, weights, retain_graph=True), strict=True
        ):
            pull = pull + inner_loop.rates.of_layer(name) * (grad * weight).sum()
    return pull


def test_a_loss_may_ask_what_adapts_and_at_which_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Algorithm(by_layer_loss_sum, rates=lambda *_: ByLayer(), learns_from="support")
    _, grads = step(learner_of(own, monkeypatch, adapt_embeddings=False))
    _, at_one = step(
        learner_of(ALGORITHMS["reptile"], monkeypatch, "melu", adapt_embeddings=False, inner_lr=1.0)
    )
    for name, rate in RATES.items():
        for kind in ("weight", "bias"):
            key = f"model.{name}.{kind}"
            torch.testing.assert_close(grads[key], rate * at_one[key])


class Unbiased(DecisionModel):
    """Decision layers of which the last has no bias."""

    pooling = "mean"

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__()
        width = sizes.num_single * config.embedding_dim
        self.layers = nn.Sequential(nn.Linear(width, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))

    @property
    def decision_layers(self) -> nn.Sequential:
        return self.layers

    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        return rows.features_NFD.flatten(1)


def test_layers_without_a_bias_adapt_in_the_general_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "unbiased", Unbiased)
    learner = learner_of(ALGORITHMS["maml"], monkeypatch, "unbiased")
    assert learner.route == "general"
    _, grads = step(learner)
    assert grads["model.layers.2.weight"].abs().sum() > 0


class Smooth(MeLU):
    """Another activation between its decision layers."""

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__(config, sizes)
        self.decision = nn.Sequential(
            *(nn.GELU() if isinstance(layer, nn.ReLU) else layer for layer in self.decision)
        )


class Halved(MeLU):
    """A forward pass of its own."""

    def forward(self, inputs: RowInputs) -> Tensor:
        output: Tensor = super().forward(inputs) / 2
        return output


@pytest.mark.parametrize("model", [Smooth, Halved])
def test_a_model_that_is_more_than_its_decision_layers_trains_as_it_predicts(
    model: type[MeLU], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "more", model)
    learner = learner_of(ALGORITHMS["maml"], monkeypatch, "more")
    loss, _ = step(learner)
    learner.use_general_loop()
    torch.testing.assert_close(step(learner)[0], loss)


class Spare(Unbiased):
    """It has a parameter of no use, and a mask that does not train."""

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__(config, sizes)
        self.spare = nn.Parameter(torch.ones(2))
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)


def test_every_rank_has_a_gradient_of_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "spare", Spare)
    loss, grads = step(learner_of(ALGORITHMS["maml"], monkeypatch, "spare"))
    assert loss.isfinite()
    assert not grads["model.spare"].any()
    assert grads["model.layers.2.weight"].any()


@dataclass(frozen=True)
class Sharpness:
    """Keys of an algorithm of one's own."""

    sharpness: float = key(1.0, "how sharp", min=0.0)


def test_an_algorithm_of_ones_own_has_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def noted(model: nn.Module, config: AlgorithmConfig) -> AlgorithmConfig:
        seen.append(config.options_of(Sharpness).sharpness)
        return config

    own = Algorithm(QueryLoss(second_order=True), preset=noted, options=Sharpness)
    learner_of(own, monkeypatch)
    learner_of(own, monkeypatch, options={**HIDDEN, "sharpness": 2.0})
    assert seen == [1.0, 2.0]
    assert catch_message(ConfigError, learner_of, own, monkeypatch, options={"sharpnes": 2.0}) == (
        "algorithm.options.sharpnes is unknown; did you mean algorithm.options.sharpness?"
    )
    plain = Algorithm(QueryLoss(second_order=True))
    with pytest.raises(ConfigError) as caught:
        learner_of(plain, monkeypatch, options={"sharpness": 2.0})
    assert str(caught.value) == (
        "algorithm.options.sharpness is given, but algorithm.name = 'own' has no options. Remove it"
    )
