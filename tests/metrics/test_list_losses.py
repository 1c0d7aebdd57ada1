"""The losses that order rows, as metrics: those that training takes, of the same scores."""

import math

import numpy as np
import pytest
import torch

from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.config.evaluation import EvaluationConfig
from gmeta.errors import ConfigError
from gmeta.losses.ranking import list_losses
from gmeta.metrics import list_losses as metric
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split

LENGTHS = [5, 1, 3, 2, 6]  # the fourth task has equal labels


@pytest.mark.parametrize("kind", ["softmax", "pairwise"])
def test_the_metric_is_what_training_minimises(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric, "MOST_PAIRS", 7)  # so that a task takes several blocks
    rng = np.random.default_rng(2)
    task_N = np.repeat(np.arange(5), LENGTHS)
    score_N, label_N = rng.normal(0, 3, 17), rng.integers(0, 3, 17).astype(np.float64)
    label_N[9:11] = 1.0
    losses_N = list_losses(
        kind, torch.tensor(score_N), torch.tensor(label_N), torch.ones(17),
        RowLayout.of(torch.tensor(LENGTHS)),
    )  # fmt: skip
    means = [losses_N[task_N == task].mean().item() for task in (0, 2, 4)]
    shuffled = rng.permutation(17)
    scoring = Scoring("softmax", EvaluationConfig(metrics=("softmax", "pairwise")))
    found = evaluate_split(label_N[shuffled], score_N[shuffled], task_N[shuffled] * 7, scoring)
    assert found[kind].value == pytest.approx(np.mean(means), abs=1e-12)
    assert found[kind].num_tasks == 3


def test_without_an_order_there_is_no_loss() -> None:
    scoring = Scoring("pairwise", EvaluationConfig(metrics=("pairwise",)))
    (found,) = evaluate_split(np.ones(4), np.arange(4), np.array([1, 1, 2, 2]), scoring).values()
    assert math.isnan(found.value)
    assert found.reason == "no task holds two different labels"


def test_labels_below_0_have_no_softmax_loss() -> None:
    """Those of a task may add up to 0."""
    scoring = Scoring("pairwise", EvaluationConfig(metrics=("softmax",)))
    (found,) = evaluate_split(np.array([-1, 1]), np.arange(2), np.ones(2), scoring).values()
    assert math.isnan(found.value)
    assert found.reason == "1 of 2 labels are below 0, and cannot share 1"


def test_scores_are_measured_by_their_order() -> None:
    scoring = Scoring("softmax")
    assert scoring.names == ("ndcg@10", "auc", "gauc")
    assert scoring.threshold == 0.5
    assert scoring.info("auc").label == "AUC"
    stars = Scoring("pairwise", EvaluationConfig(positive_rating=4.0))
    assert stars.threshold == 4.0
    assert stars.info("auc").label == "AUC (rating \N{GREATER-THAN OR EQUAL TO} 4)"


@pytest.mark.parametrize(
    ("loss", "name", "message"),
    [
        ("softmax", "logloss", "evaluation.metrics[0] = 'logloss' is of probabilities or ratings, "
         "but with outer.loss = 'softmax' the model predicts scores, which tell the order of a "
         "task's rows alone. Choose ndcg@10, gauc or softmax"),
        ("pairwise", "mae", "evaluation.metrics[0] = 'mae' is of probabilities or ratings, but "
         "with outer.loss = 'pairwise' the model predicts scores, which tell the order of a task's "
         "rows alone. Choose ndcg@10, gauc or pairwise"),
    ],
)  # fmt: skip
def test_metrics_of_something_but_scores_are_refused(loss: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Scoring(loss, EvaluationConfig(metrics=(name,)))  # type: ignore[arg-type]
    assert str(caught.value) == message
