"""Average precision, calibration error and influences against scikit-learn and slow loops."""

import numpy as np
import pytest

from gmeta.config.evaluation import EvaluationConfig
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split, split_terms
from gmeta.metrics.terms import Array
from tests.metrics.scikit import scikit
from tests.metrics.slow import few_rows, weighted

CHOSEN = Scoring("bce", EvaluationConfig(metrics=("pr_auc", "ece", "auc", "mae")))


@pytest.mark.parametrize("levels", [3, 20, 100_000])
def test_pr_auc_agrees_with_scikit_learn(levels: int) -> None:
    rng = np.random.default_rng(levels)
    score_N = rng.integers(0, levels, 3_000) / levels
    label_N = (rng.random(3_000) < score_N**2).astype(np.float32)
    value = evaluate_split(label_N, score_N, rng.integers(0, 40, 3_000), CHOSEN)["pr_auc"].value
    assert value == pytest.approx(scikit.average_precision_score(label_N, score_N), rel=1e-12)


def ece_by_loop(label_N: Array, probability_N: Array) -> float:
    total = 0.0
    for bin_ in range(15):
        low, high = bin_ / 15, (bin_ + 1) / 15
        rows = [
            index
            for index, p in enumerate(probability_N)
            if low < p <= high or (bin_ == 0 and p == 0)
        ]
        if rows:
            apart = np.mean([label_N[row] for row in rows]) - np.mean(
                [probability_N[row] for row in rows]
            )
            total += len(rows) / len(label_N) * abs(apart)
    return total


def test_ece_agrees_with_a_loop_over_its_bins() -> None:
    rng = np.random.default_rng(1)
    probability_N = np.concatenate([[0.0, 1.0, 1.0], rng.random(2_000) ** 3])
    label_N = (rng.random(2_003) < probability_N * 0.7).astype(np.float64)
    value = evaluate_split(label_N, probability_N, np.arange(2_003), CHOSEN)["ece"].value
    assert value == pytest.approx(ece_by_loop(label_N, probability_N), rel=1e-12)
    assert 0.05 < value < 0.2


def test_a_calibrated_model_has_no_ece_and_an_overconfident_one_has_its_distance() -> None:
    label_N, task_N = np.tile([0.0, 1.0], 50), np.arange(100)
    assert evaluate_split(label_N, np.full(100, 0.5), task_N, CHOSEN)["ece"].value == 0.0
    told = evaluate_split(label_N, np.full(100, 0.9), task_N, CHOSEN)["ece"].value
    assert told == pytest.approx(0.4)


@pytest.mark.parametrize("name", ["pr_auc", "ece", "auc", "mae"])
def test_a_tasks_term_is_the_derivative_by_its_weight(name: str) -> None:
    """Against the metric itself, with one task's rows counted once more than the others' are."""
    rows, times = few_rows(4), 1_000
    rows = (rows[0], (rows[1] * 0.9 + 0.03).astype(np.float64), rows[2])  # inside of the bins
    terms = split_terms(*rows, CHOSEN)[name]
    tasks = np.unique(rows[2])
    for index, task in enumerate(tasks):
        weight_T = np.ones(tasks.size)
        weight_T[index] += 1 / times
        heavier = (weight_T @ terms.num_T) / (weight_T @ terms.den_T)
        exact = evaluate_split(*weighted(rows, int(task), times), CHOSEN)[name].value
        # Of second order in the weight: a thousandth of the difference itself.
        assert heavier - terms.value == pytest.approx(exact - terms.value, rel=4e-3, abs=1e-7)


def test_one_class_has_no_pr_auc() -> None:
    one = evaluate_split(np.ones(3), np.arange(3) / 3, np.zeros(3), CHOSEN)["pr_auc"]
    assert np.isnan(one.value)
    assert one.reason == "3 positive and 0 negative rows: both classes are needed"
