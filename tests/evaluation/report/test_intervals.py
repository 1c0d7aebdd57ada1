"""Intervals over tasks against a slow bootstrap, against known spreads, and for repeatability."""

import math

import numpy as np
import pytest

from gmeta.config.losses import Loss
from gmeta.evaluation.report.intervals import MAX_UNITS, bootstrap, percentile_interval
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split, split_terms
from gmeta.metrics.terms import Array
from tests.support.refusals import catch_message

# N rows, T tasks, B resamples


def tasks_with_taste(num_tasks: int, loss: Loss, seed: int = 0) -> tuple[Array, Array, Array]:
    """Tasks of 2 to 20 rows, each with its own taste, so that the rows of a task go together."""
    rng = np.random.default_rng(seed)
    task_N = np.repeat(np.arange(num_tasks), rng.integers(2, 21, num_tasks))
    taste_N = rng.normal(0, 1, num_tasks)[task_N]
    if loss == "mse":
        label_N = np.clip(np.round(3.5 + taste_N + rng.normal(0, 1, task_N.size)), 1, 5)
        return label_N, 3.5 + 0.7 * taste_N + rng.normal(0, 0.3, task_N.size), task_N
    logit_N = taste_N + rng.normal(0, 1, task_N.size)
    label_N = (rng.random(task_N.size) < 1 / (1 + np.exp(-logit_N))).astype(np.float64)
    return label_N, 1 / (1 + np.exp(-0.8 * logit_N)), task_N


def slow_bootstrap(
    rows: tuple[Array, Array, Array], loss: Loss, name: str, resamples: int
) -> Array:
    """Draw tasks, copy their rows under new task numbers, and compute the metric afresh."""
    rng = np.random.default_rng(7)
    label_N, score_N, task_N = rows
    rows_of_task = [np.flatnonzero(task_N == task) for task in np.unique(task_N)]
    values = []
    for _ in range(resamples):
        drawn = [rows_of_task[t] for t in rng.integers(0, len(rows_of_task), len(rows_of_task))]
        picked = np.concatenate(drawn)
        renamed = np.repeat(np.arange(len(drawn)), [len(one) for one in drawn])
        values.append(
            evaluate_split(label_N[picked], score_N[picked], renamed, Scoring(loss))[name].value
        )
    return np.array(values)


@pytest.mark.parametrize(
    ("loss", "name"),
    [("bce", "auc"), ("bce", "gauc"), ("bce", "logloss"), ("mse", "rmse"), ("mse", "ndcg@3")],
)
def test_intervals_agree_with_a_bootstrap_that_recomputes_the_metric(loss: Loss, name: str) -> None:
    rows = tasks_with_taste(150, loss)
    slow = percentile_interval(slow_bootstrap(rows, loss, name, 400), 150)
    fast = percentile_interval(bootstrap([split_terms(*rows, Scoring(loss))[name]], 4000)[0], 150)
    width = slow.high - slow.low
    assert fast.low == pytest.approx(slow.low, abs=0.2 * width)
    assert fast.high == pytest.approx(slow.high, abs=0.2 * width)


def test_the_interval_of_a_mean_has_the_width_of_its_standard_error() -> None:
    rng = np.random.default_rng(3)
    error_T = rng.exponential(1.0, 2_000)
    terms = split_terms(np.zeros(2_000), error_T, np.arange(2_000), Scoring("mse"))["mae"]
    interval = percentile_interval(bootstrap([terms], 4_000)[0], 2_000)
    half_width = 1.96 * error_T.std() / math.sqrt(2_000)
    assert interval.high - error_T.mean() == pytest.approx(half_width, rel=0.1)
    assert error_T.mean() - interval.low == pytest.approx(half_width, rel=0.1)


def test_pooling_very_many_tasks_keeps_the_width() -> None:
    num_tasks = int(2.5 * MAX_UNITS)
    error_T = np.random.default_rng(3).exponential(1.0, num_tasks)
    terms = split_terms(np.zeros(num_tasks), error_T, np.arange(num_tasks), Scoring("mse"))["mae"]
    spread = bootstrap([terms], 1_000)[0].std()
    assert spread == pytest.approx(error_T.std() / math.sqrt(num_tasks), rel=0.1)


@pytest.mark.parametrize("name", ["auc", "pr_auc"])
def test_a_class_of_few_tasks_has_no_interval(name: str) -> None:
    # However many tasks hold the other class: of one positive row an interval held the truth in 6
    # of 100 samples.
    rng, task_N = np.random.default_rng(0), np.repeat(np.arange(200), 5)
    for positives, has_one in ((1, False), (9, False), (10, True)):
        label_N = np.zeros(task_N.size)
        label_N[5 * np.arange(positives)] = 1
        label_N[1] = 1  # of a task that holds one already
        for labels_N in (label_N, 1 - label_N):
            score_N = rng.normal(size=task_N.size) + labels_N
            terms = split_terms(labels_N, score_N, task_N, Scoring("bce"), [name])[name]
            interval = percentile_interval(bootstrap([terms], 100)[0], terms.num_tasks)
            assert terms.num_tasks == positives
            assert math.isfinite(interval.low) == has_one
            tasks = f"{positives} task{'s' * (positives > 1)}"
            told = "" if has_one else f"rests on only {tasks}: too few to resample"
            assert interval.reason == told


def test_two_equal_models_differ_by_exactly_nothing_in_every_resample() -> None:
    terms = split_terms(*tasks_with_taste(50, "bce"), Scoring("bce"))["auc"]
    first_B, second_B = bootstrap([terms, terms])
    assert np.array_equal(first_B, second_B)


def test_pairing_sees_a_small_difference_that_single_intervals_hide() -> None:
    label_N, score_N, task_N = tasks_with_taste(200, "mse")
    better = split_terms(label_N, score_N, task_N, Scoring("mse"))["mae"]
    worse = split_terms(label_N, label_N + 1.02 * (score_N - label_N), task_N, Scoring("mse"))[
        "mae"
    ]
    better_B, worse_B = bootstrap([better, worse])
    assert percentile_interval(worse_B, 200).low < percentile_interval(better_B, 200).high
    assert percentile_interval(worse_B - better_B, 200).low > 0


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    terms = list(split_terms(*tasks_with_taste(30, "bce"), Scoring("bce")).values())
    assert np.array_equal(bootstrap(terms, seed=1), bootstrap(terms, seed=1))
    assert not np.array_equal(bootstrap(terms, seed=1), bootstrap(terms, seed=2))


def test_models_resampled_in_separate_calls_still_see_the_same_draws() -> None:
    rows = tasks_with_taste(40, "bce")
    terms = split_terms(*rows, Scoring("bce"))
    together = bootstrap([terms["auc"], terms["logloss"]])
    assert np.array_equal(bootstrap([terms["logloss"]])[0], together[1])


def test_few_tasks_give_no_interval() -> None:
    interval = percentile_interval(np.ones(100), 9)
    assert math.isnan(interval.low)
    assert interval.reason == "rests on only 9 tasks: too few to resample"
    found = percentile_interval(np.ones(100), 1).reason
    assert found == "rests on only 1 task: too few to resample"


def test_undefined_draws_give_no_interval() -> None:
    interval = percentile_interval(np.array([np.nan] * 3 + [1.0] * 97), 50)
    assert math.isnan(interval.high)
    assert interval.reason == "undefined in 3 of 100 resamples"


def test_no_tasks_give_undefined_values() -> None:
    empty = np.zeros(0)
    terms = split_terms(empty, empty, empty, Scoring("bce"))["auc"]
    assert np.isnan(bootstrap([terms], resamples=5)).all()


def test_metrics_over_different_tasks_are_not_paired() -> None:
    one = split_terms(*tasks_with_taste(20, "bce"), Scoring("bce"))["auc"]
    other = split_terms(*tasks_with_taste(30, "bce"), Scoring("bce"))["auc"]
    assert catch_message(ValueError, bootstrap, [one, other]) == (
        "these metrics are over [20, 30] tasks: a paired resample needs the same tasks in each. "
        "Resample each set of tasks by itself."
    )
