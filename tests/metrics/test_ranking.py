"""Rank metrics against every order that ties leave open, one after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.config.evaluation import EvaluationConfig
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split
from tests.metrics.slow import few_rows, mean_over_tasks

NAMES = ("hr@1", "hr@3", "p@1", "p@3", "p@9", "recall@2", "mrr", "ndcg@3")
CHOSEN = Scoring("bce", EvaluationConfig(metrics=NAMES))


def reciprocal_rank(labels: list[float]) -> float:
    return 1.0 / (labels.index(1.0) + 1)


@pytest.mark.parametrize("seed", range(3))
def test_rank_metrics_are_the_mean_over_all_orders_of_equal_scores(seed: int) -> None:
    rows = few_rows(seed)
    values = {name: one.value for name, one in evaluate_split(*rows, CHOSEN).items()}
    expected = {
        "hr@1": mean_over_tasks(rows, lambda labels: max(labels[:1])),
        "hr@3": mean_over_tasks(rows, lambda labels: max(labels[:3])),
        "p@1": mean_over_tasks(rows, lambda labels: sum(labels[:1])),
        "p@3": mean_over_tasks(rows, lambda labels: sum(labels[:3]) / 3),
        "p@9": mean_over_tasks(rows, lambda labels: sum(labels[:9]) / 9),
        "recall@2": mean_over_tasks(rows, lambda labels: sum(labels[:2]) / sum(labels)),
        "mrr": mean_over_tasks(rows, reciprocal_rank),
        "ndcg@3": mean_over_tasks(rows, ndcg_at_3),
    }
    assert values == pytest.approx(expected, rel=1e-12)


def ndcg_at_3(labels: list[float]) -> float:
    weights = 1 / np.log2(np.arange(2, 5))
    ideal = sorted(labels, reverse=True)[:3]
    return float(np.dot(labels[:3], weights[: len(labels)]) / np.dot(ideal, weights[: len(ideal)]))


@given(size=st.integers(2, 400), positives=st.integers(1, 400), k=st.integers(1, 400))
def test_a_constant_model_hits_as_often_as_an_urn(size: int, positives: int, k: int) -> None:
    positives, k = min(positives, size), min(k, size)
    label_N = (np.arange(size) < positives).astype(np.float32)
    names = (f"hr@{k}", f"p@{k}", f"recall@{k}", "mrr")
    scoring = Scoring("bce", EvaluationConfig(metrics=names))
    values = evaluate_split(label_N, np.zeros(size), np.zeros(size, np.int64), scoring)
    miss, first = 1.0, 0.0
    for draw in range(size):  # from an urn, without putting back
        chance = positives / (size - draw)
        hit = miss * min(chance, 1.0)
        first += hit / (draw + 1)
        miss -= hit
        if draw == k - 1:
            missed_so_far = miss
    expected = [1 - missed_so_far, positives / size, k / size, first]
    assert [values[name].value for name in names] == pytest.approx(expected, abs=1e-9)


def test_tasks_without_a_positive_row_do_not_count() -> None:
    label_N, score_N = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    values = evaluate_split(label_N, score_N, np.array([5, 5, 6, 6]), CHOSEN)
    assert [values[name].value for name in ("hr@1", "hr@3", "p@1", "mrr")] == [0.0, 1.0, 0.0, 0.5]
    assert {values[name].num_tasks for name in NAMES} == {1}
    for name, one in evaluate_split(np.zeros(4), score_N, np.arange(4), CHOSEN).items():
        assert np.isnan(one.value)
        assert one.num_tasks == 0
        missing = "row with gain" if name == "ndcg@3" else "positive row"
        assert one.reason == f"no task holds a {missing}"


def test_a_rating_counts_as_liked_from_the_chosen_one_on() -> None:
    label_N, score_N, task_N = np.array([1.0, 3.0, 5.0]), np.array([0.3, 0.2, 0.1]), np.zeros(3)
    for positive, rank in ((5.0, 3), (3.0, 2), (0.5, 1)):
        config = EvaluationConfig(metrics=("mrr",), positive_rating=positive)
        value = evaluate_split(label_N, score_N, task_N, Scoring("mse", config))["mrr"].value
        assert value == pytest.approx(1 / rank)
