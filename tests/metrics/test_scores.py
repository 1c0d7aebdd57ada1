"""Metrics against scikit-learn and against loops that are slow and obvious."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gmeta.metrics.scores
from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.losses import Loss
from gmeta.errors import ConfigError
from gmeta.metrics.catalogue import Scoring, metric_infos
from gmeta.metrics.scores import evaluate_split, logloss, mae, split_terms
from gmeta.metrics.terms import Array, Terms
from tests.metrics.scikit import scikit
from tests.metrics.slow import few_rows, weighted
from tests.support.refusals import catch_message

# N rows, T tasks


def clicks(
    num_rows: int, num_tasks: int, seed: int = 0, levels: int = 50
) -> tuple[Array, Array, Array]:
    """Labels, tied probabilities and tasks whose rows are not next to each other."""
    rng = np.random.default_rng(seed)
    score_N = (rng.integers(0, levels, num_rows) / levels).astype(np.float32)
    label_N = (rng.random(num_rows) < score_N).astype(np.float32)
    return label_N, score_N, rng.integers(-3, num_tasks - 3, num_rows)


def ratings(num_rows: int, num_tasks: int, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    label_N = rng.integers(1, 6, num_rows).astype(np.float32)
    score_N = np.round(label_N + rng.normal(0, 1.5, num_rows), 1).astype(np.float32)
    return label_N, score_N, rng.integers(0, num_tasks, num_rows)


def auc(label_N: Array, score_N: Array) -> float:
    task_N = np.zeros(len(label_N), np.int64)
    return evaluate_split(label_N, score_N, task_N, Scoring("bce"), ["auc"])["auc"].value


def gauc(label_N: Array, score_N: Array, task_N: Array) -> float:
    return evaluate_split(label_N, score_N, task_N, Scoring("bce"), ["gauc"])["gauc"].value


def ndcg_at_k(label_N: Array, score_N: Array, task_N: Array, k: int) -> float:
    name = f"ndcg@{k}"
    return evaluate_split(label_N, score_N, task_N, Scoring("mse"), [name])[name].value


def auc_by_pairs(label_N: Array, score_N: Array) -> float:
    positives, negatives = score_N[label_N > 0.5], score_N[label_N <= 0.5]
    won = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return float(won / (len(positives) * len(negatives)))


def gauc_by_loop(label_N: Array, score_N: Array, task_N: Array) -> float:
    total, weight = 0.0, 0
    for task in set(task_N.tolist()):
        rows = task_N == task
        if len(set(label_N[rows].tolist())) == 2:
            total += rows.sum() * scikit.roc_auc_score(label_N[rows], score_N[rows])
            weight += rows.sum()
    return total / weight


def ndcg_by_loop(label_N: Array, score_N: Array, task_N: Array, k: int) -> float:
    values = []
    for task in set(task_N.tolist()):
        rows = task_N == task
        if rows.sum() == 1:  # scikit-learn refuses a single document, whose only order is ideal
            values.append(1.0)
        else:
            values.append(scikit.ndcg_score(label_N[rows][None], score_N[rows][None], k=k))
    return float(np.mean(values))


def value_of_sums(terms: Terms) -> float:
    mean = terms.num_T.sum() / terms.den_T.sum()
    return math.sqrt(mean) if terms.is_root else float(mean)


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(gmeta.metrics.scores)
    assert outcome.attempted >= 3
    assert outcome.failed == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=2, max_size=30))
def test_auc_counts_pairs_and_halves_ties(rows: list[tuple[bool, int]]) -> None:
    label_N = np.array([float(positive) for positive, _ in rows])
    score_N = np.array([float(score) for _, score in rows])
    if len(set(label_N.tolist())) < 2:
        assert math.isnan(auc(label_N, score_N))
    else:
        assert auc(label_N, score_N) == pytest.approx(auc_by_pairs(label_N, score_N), abs=1e-15)


@pytest.mark.parametrize("levels", [1, 3, 100_000])
def test_auc_equals_scikit_learn(levels: int) -> None:
    label_N, score_N, _ = clicks(5_000, 1, levels=max(levels, 2))
    score_N = score_N if levels > 1 else np.full_like(score_N, 0.25)
    assert auc(label_N, score_N) == pytest.approx(scikit.roc_auc_score(label_N, score_N), abs=1e-14)


def test_auc_of_a_million_rows_does_not_overflow() -> None:
    label_N, score_N, _ = clicks(1_000_000, 1, levels=1000)
    assert auc(label_N, score_N) == pytest.approx(scikit.roc_auc_score(label_N, score_N), abs=1e-12)


@pytest.mark.parametrize(("num_rows", "num_tasks"), [(40, 3), (3_000, 200), (3_000, 2_000)])
def test_gauc_equals_a_loop_over_tasks(num_rows: int, num_tasks: int) -> None:
    label_N, score_N, task_N = clicks(num_rows, num_tasks, levels=5)
    found = gauc(label_N, score_N, task_N)
    assert found == pytest.approx(gauc_by_loop(label_N, score_N, task_N), abs=1e-14)


def test_gauc_leaves_out_tasks_of_one_class() -> None:
    label_N, score_N, task_N = clicks(200, 10)
    with_extra = [
        np.append(label_N, np.ones(50)),
        np.append(score_N, np.zeros(50)),
        np.append(task_N, [99] * 50),
    ]
    assert gauc(*with_extra) == gauc(label_N, score_N, task_N)
    assert evaluate_split(*with_extra, Scoring("bce"))["gauc"].num_tasks == 10


@pytest.mark.parametrize("k", [1, 3, 50])
def test_ndcg_equals_scikit_learn_task_by_task(k: int) -> None:
    label_N, score_N, task_N = ratings(2_000, 150)
    expected = ndcg_by_loop(label_N, score_N, task_N, k)
    assert ndcg_at_k(label_N, score_N, task_N, k) == pytest.approx(expected, abs=1e-12)


def test_ndcg_gives_a_constant_model_the_chance_expectation() -> None:
    label_N, task_N = np.array([5.0, 3.0, 1.0]), np.zeros(3, np.int64)
    assert ndcg_at_k(label_N, np.zeros(3), task_N, 1) == pytest.approx(3.0 / 5.0)


def test_ndcg_leaves_out_tasks_without_gain() -> None:
    label_N, task_N = np.array([5.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1])
    assert ndcg_at_k(label_N, np.array([1.0, 2.0, 1.0, 2.0]), task_N, 1) == pytest.approx(0.2)
    assert math.isnan(ndcg_at_k(np.zeros(2), np.ones(2), np.zeros(2, np.int64), 1))


def test_errors_over_rows_equal_scikit_learn() -> None:
    label_N, score_N, _ = ratings(1_000, 10)
    expected = scikit.mean_absolute_error(label_N, score_N)
    assert mae(label_N, score_N) == pytest.approx(expected, rel=1e-6)


def test_logloss_equals_scikit_learn_also_where_it_clips() -> None:
    label_N = np.array([0, 1, 1, 0, 1], np.float32)
    probability_N = np.array([0.2, 0.9, 0.0, 1.0, 1.0], np.float32)
    found = logloss(label_N, probability_N)
    assert found == pytest.approx(scikit.log_loss(label_N, probability_N), rel=1e-6)
    assert math.isfinite(logloss(label_N, probability_N))


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_every_metric_equals_its_sums_over_tasks(loss: Loss) -> None:
    rows = clicks(2_000, 90) if loss == "bce" else ratings(2_000, 90)
    values, terms = evaluate_split(*rows, Scoring(loss)), split_terms(*rows, Scoring(loss))
    assert list(values) == list(terms) == list(metric_infos(Scoring(loss)))
    for name, one in terms.items():
        assert value_of_sums(one) == pytest.approx(values[name].value, abs=1e-12), name


def test_evaluate_split_of_ratings_agrees_with_scikit_learn() -> None:
    label_N, score_N, task_N = ratings(900, 60)
    values = {
        name: one.value
        for name, one in evaluate_split(label_N, score_N, task_N, Scoring("mse")).items()
    }
    liked_N = label_N >= 4
    expected = {
        "mae": scikit.mean_absolute_error(label_N, score_N),
        "rmse": scikit.root_mean_squared_error(label_N, score_N),
        "ndcg@1": ndcg_by_loop(label_N, score_N, task_N, 1),
        "ndcg@3": ndcg_by_loop(label_N, score_N, task_N, 3),
        "auc": scikit.roc_auc_score(liked_N, score_N),
        "gauc": gauc_by_loop(liked_N, score_N, task_N),
    }
    assert list(values) == list(expected)
    assert values == pytest.approx(expected, rel=1e-6)
    assert values["mae"] == mae(label_N, score_N)


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_the_order_of_rows_does_not_matter(loss: Loss) -> None:
    rows = clicks(700, 40) if loss == "bce" else ratings(700, 40)
    order_N = np.random.default_rng(1).permutation(700)
    shuffled = evaluate_split(*(column[order_N] for column in rows), Scoring(loss))
    for name, one in evaluate_split(*rows, Scoring(loss)).items():
        assert shuffled[name].value == pytest.approx(one.value, abs=1e-12), name


def test_one_class_leaves_ranking_undefined_and_says_so() -> None:
    values = evaluate_split(np.zeros(4), np.full(4, 0.5), np.array([0, 0, 1, 1]), Scoring("bce"))
    assert math.isnan(values["auc"].value)
    assert values["auc"].reason == "0 positive and 4 negative rows: both classes are needed"
    assert math.isnan(values["gauc"].value)
    assert values["gauc"].reason == "no task holds both classes"
    assert values["logloss"].value == pytest.approx(math.log(2))


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_an_empty_split_is_undefined_not_zero(loss: Loss) -> None:
    empty = np.zeros(0)
    for one in evaluate_split(empty, empty, empty, Scoring(loss)).values():
        assert math.isnan(one.value)
        assert (one.reason, one.num_tasks) == ("no rows", 0)
    assert math.isnan(mae(empty, empty))


def test_a_diverged_model_has_no_metrics() -> None:
    label_N, score_N, task_N = ratings(100, 5)
    score_N[:3] = np.nan
    for one in evaluate_split(label_N, score_N, task_N, Scoring("mse")).values():
        assert math.isnan(one.value)
        assert one.reason == "3 of 100 predictions are not finite: the model diverged"


def test_negative_labels_have_no_ndcg() -> None:
    values = evaluate_split(np.array([-1.0, 2.0]), np.zeros(2), np.zeros(2), Scoring("mse"))
    assert math.isnan(values["ndcg@1"].value)
    assert values["ndcg@1"].reason == "labels below 0 have no gain"


def test_metrics_can_be_picked_by_name() -> None:
    assert list(split_terms(*clicks(50, 4), Scoring("bce"), names=["logloss"])) == ["logloss"]


def test_ranking_where_nothing_can_be_gained_has_no_score() -> None:
    """A 0 would pass for a model that ranks badly."""
    values = evaluate_split(np.zeros(4), np.arange(4.0), np.array([1, 1, 2, 2]), Scoring("mse"))
    assert math.isnan(values["ndcg@1"].value)
    assert values["ndcg@1"].num_tasks == 0
    assert values["ndcg@1"].reason == "no task holds a row with gain"


@pytest.mark.parametrize(
    ("loss", "metrics", "message"),
    [
        (
            "bce",
            ("auc", "map@5"),
            "evaluation.metrics[1] = 'map@5' is no metric: choose one of auc, "
            "gauc, pr_auc, logloss, ece, mae, rmse, mrr, softmax, pairwise, ndcg@K, "
            "hr@K, p@K, recall@K, with a whole number from 1 to 10,000 for K, or name yours as "
            "package.module:Name (docs/extending.md)",
        ),
        (
            "mse",
            ("logloss",),
            "evaluation.metrics[0] = 'logloss' is of probabilities, but with outer.loss = 'mse' "
            "the model predicts ratings. Choose mae or rmse",
        ),
    ],
)
def test_senseless_metrics_are_refused(loss: Loss, metrics: tuple[str, ...], message: str) -> None:
    assert catch_message(ConfigError, Scoring, loss, EvaluationConfig(metrics=metrics)) == message


@pytest.mark.parametrize(
    "name", ["hr@0", "hr@10001", "hr@", "hr", "ndcg@-1", "NDCG@5", "auc@3", ""]
)
def test_no_k_is_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match="is no metric"):
        Scoring("bce", EvaluationConfig(metrics=(name,)))


def test_the_chosen_metrics_are_reported_in_their_order_and_their_unit() -> None:
    names = ("ndcg@5", "hr@10", "mae", "gauc")
    config = EvaluationConfig(metrics=names, positive_rating=3.5, unit="stars")
    infos = metric_infos(Scoring("huber", config))
    assert [(name, one.label, one.unit) for name, one in infos.items()] == [
        ("ndcg@5", "nDCG@5", ""), ("hr@10", "HR@10 (≥ 3.5)", ""), ("mae", "MAE", "stars"),
        ("gauc", "GAUC (rating ≥ 3.5)", ""),
    ]  # fmt: skip
    clicks_info = metric_infos(Scoring("bce", EvaluationConfig(metrics=names)))
    assert [one.label for one in clicks_info.values()] == ["nDCG@5", "HR@10", "MAE", "GAUC"]
    assert clicks_info["mae"].unit == ""
    assert list(evaluate_split(*clicks(90, 9), Scoring("bce", config))) == list(names)


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
