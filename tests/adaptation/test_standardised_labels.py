"""Labels in seconds, standardised inside, against the same labels standardised by hand."""

import random
from dataclasses import replace

import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import LabelPrior, SupportFeaturesConfig
from gmeta.config.labels import LabelsConfig
from gmeta.data.features.support_statistics import SupportStatistics
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.support import reference

MEAN, DEVIATION = 5000.0, 1024.0
FEATURES = reference.some_features(2, 1, 1)
INSIDE = LabelsConfig(standardise=True, moments=(MEAN, DEVIATION))
CASES = [
    (AlgorithmConfig("maml"), "melu", "mse"), (AlgorithmConfig("fomaml"), "dlrm", "mae"),
    (AlgorithmConfig("none"), "melu", "huber"), (AlgorithmConfig("reptile"), "melu", "huber"),
    (AlgorithmConfig("encoder_maml"), "deepfm", "mse"), (AlgorithmConfig("ridge"), "melu", "mse"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "model", "loss"), CASES)
def test_a_step_and_predictions_are_those_of_labels_standardised_by_hand(
    algorithm: AlgorithmConfig, model: str, loss: str
) -> None:
    rng = random.Random(0)
    tasks = [reference.random_task(FEATURES, 3, 4, rng) for _ in range(5)]
    by_hand = reference.batch_of(tasks, FEATURES)
    raw = replace(by_hand, label_N=by_hand.label_N * DEVIATION + MEAN)
    config = ModelConfig(model, 4, hidden=(6, 5))
    inputs = SupportFeaturesConfig(task=True)
    learners = []
    for labels, prior in (
        (INSIDE, LabelPrior(MEAN, DEVIATION)),
        (LabelsConfig(), LabelPrior(0.0, 1.0)),
    ):
        torch.manual_seed(0)
        statistics = SupportStatistics.of(inputs, FEATURES, prior)
        learners.append(
            build_learner(
                FEATURES, config, algorithm, loss, statistics=statistics, labels=labels
            ).double()
        )
    rows_UD = torch.randn(len(raw.unique_ids_U), 4, dtype=torch.float64, requires_grad=True)
    found = []
    for learner, batch in zip(learners, (raw, by_hand), strict=True):
        step = learner(rows_UD, learner.collate(batch), 1.0)
        wanted = [rows_UD, *learner.model.parameters()]
        grads = torch.autograd.grad(step, wanted, allow_unused=True, materialize_grads=True)
        after_N = learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N
        found.append((step, grads, learner.objectives.outer.predictions(after_N)))
    (step, grads, seconds_N), (expected, expected_grads, units_N) = found
    torch.testing.assert_close(step, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seconds_N, units_N * DEVIATION + MEAN, rtol=1e-6, atol=1e-3)
