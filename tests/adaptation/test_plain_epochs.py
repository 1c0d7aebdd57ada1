"""A plain epoch in front of meta-training is plain training's to the bit; then the algorithm's."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.support import reference

FEATURES = reference.some_features(2, 1, 1)
SIZES = [(3, 2), (0, 2), (4, 0), (2, 3)]
MODEL = ModelConfig(name="melu", embedding_dim=4, hidden=(6, 5))


def learner_of(name: str, plain_epochs: int = 0) -> MetaLearner:
    content: dict[str, Any] = {}
    if name == "metaemb":
        content = {"adapt_embeddings": ("s1",), "options": {"content": ("m0",)}}
    algorithm = AlgorithmConfig(name=name, inner_lr=0.1, plain_epochs=plain_epochs, **content)
    torch.manual_seed(3)
    return build_learner(FEATURES, MODEL, algorithm, "bce").to(torch.float64)


def step(learner: MetaLearner, epoch: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients, those of the fetched rows among them."""
    rng = random.Random(5)
    batch = reference.batch_of(
        [reference.random_task(FEATURES, *of, rng) for of in SIZES], FEATURES
    )
    torch.manual_seed(7)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    episodes = learner.collate(batch, epoch)
    loss = learner(rows_UD, episodes, weight=1 / episodes.num_terms)
    named = {"rows": rows_UD, **dict(learner.named_parameters())}
    grads = torch.autograd.grad(loss, [*named.values()])  # refuses what the loss does not reach
    return loss.detach(), dict(zip(named, grads, strict=True))


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"encoder", "encoder_maml", "metaemb"}))
def test_a_plain_epoch_is_plain_training_and_teaches_nothing_else(name: str) -> None:
    learner = learner_of(name, plain_epochs=2)
    (loss, grads), (plain_loss, plain) = step(learner, 1), step(learner_of("none"))
    assert torch.equal(loss, plain_loss)
    for key, grad in grads.items():
        assert torch.equal(grad, plain.get(key, torch.zeros_like(grad))), key


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_behind_its_plain_epochs_an_algorithm_is_itself(name: str) -> None:
    learner = learner_of(name, plain_epochs=2)
    early, _ = step(learner, 1)
    (loss, grads), (own_loss, own) = step(learner, 2), step(learner_of(name))
    assert torch.equal(loss, own_loss)
    assert not torch.equal(loss, early)
    for key, grad in own.items():
        assert torch.equal(grads[key], grad), key


@pytest.mark.parametrize("name", ["encoder", "metaemb"])
def test_a_plain_epoch_trains_the_model_as_it_is_before_any_support_row(name: str) -> None:
    learner = learner_of(name, plain_epochs=1)
    loss, grads = step(learner, 0)
    assert bool(loss.isfinite())
    assert bool(grads["rows"].abs().sum() > 0)
