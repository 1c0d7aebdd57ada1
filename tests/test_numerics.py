"""bfloat16 products: close to float32 in loss and gradient, for every algorithm and model."""

import random

import pytest
import torch

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.build import build_learner
from gmeta.learner import MetaLearner
from gmeta.numerics import autocast
from models import ModelConfig
from tests import reference

FEATURES = reference.some_features(3, 1, 2)
CPU = torch.device("cpu")


def loss_and_gradient(learner: MetaLearner, precision: str) -> tuple[float, torch.Tensor]:
    rng = random.Random(7)
    tasks = [reference.random_task(FEATURES, 6, 5, rng) for _ in range(24)]
    episodes = learner.arrange(reference.batch_of(tasks, FEATURES).map(single))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(episodes.unique_ids_U.numel(), 8, generator=generator).requires_grad_()
    with autocast(precision, CPU):
        loss = learner(rows, episodes, 1.0 / episodes.num_terms)
    grads = torch.autograd.grad(loss, [rows, *learner.parameters()], allow_unused=True)
    return loss.item(), torch.cat([grad.flatten() for grad in grads if grad is not None])


def single(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.is_floating_point() else values


@pytest.mark.parametrize("model", ["dlrm", "melu", "cbml"])
@pytest.mark.parametrize("algorithm", ["maml", "fomaml", "anil", "reptile", "metasgd", "none"])
def test_bf16_is_close_to_float32(algorithm: str, model: str) -> None:
    torch.manual_seed(0)
    learner = build_learner(
        FEATURES,
        ModelConfig(name=model, embedding_dim=8, hidden=(32, 16), bottom=(16,)),
        AlgorithmConfig(name=algorithm, inner_lr=0.1, inner_steps=2),
        "bce",
    )
    learner.use_general_loop()
    loss, gradient = loss_and_gradient(learner, "float32")
    loss_16, gradient_16 = loss_and_gradient(learner, "bf16")
    assert gradient_16.dtype == torch.float32
    assert loss_16 != loss  # it does something
    # bfloat16 keeps 8 bits: 0.4 % a product.
    assert loss_16 == pytest.approx(loss, rel=0.01)
    assert torch.cosine_similarity(gradient, gradient_16, dim=0) > 0.995
