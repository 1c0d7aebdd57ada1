"""The bias model against dictionaries and a root finder."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from gmeta.config.losses import Loss
from gmeta.evaluation.baselines.bias_model import COARSE_PRIORS, PRIORS, BiasModel, choose_bias
from gmeta.evaluation.baselines.episode_rows import NO_ITEM, EpisodeRows
from gmeta.evaluation.baselines.training_sums import assign_folds, sum_training_rows
from gmeta.metrics.scores import logloss, mae
from tests.evaluation.baselines.sample import FEATURES, ITEM, PlainRow, episode_rows, plain


def root(rows: list[tuple[float, float]], prior: float) -> float:
    """b with sum (y - sigmoid(level + b)) = prior * b, by bisection; rows of (y, level)."""
    low, high = -60.0, 60.0
    for _ in range(200):
        b = (low + high) / 2
        slope = sum(y - 1 / (1 + math.exp(-(level + b))) for y, level in rows) - prior * b
        low, high = (b, high) if slope > 0 else (low, b)
    return (low + high) / 2


def slow_predictions(
    loss: Loss, train: list[PlainRow], rows: list[PlainRow], item_prior: float, task_prior: float
) -> list[float]:
    """What the docstring of bias.py says, row by row."""
    mu = sum(row.label for row in train) / len(train)
    start = math.log(mu / (1 - mu)) if loss == "bce" else mu
    of_item: dict[int, list[float]] = defaultdict(list)
    for row in train:
        of_item[row.ids[ITEM][0]].append(row.label)

    def effect(labels: list[tuple[float, float]], prior: float) -> float:
        if loss == "bce":
            return root(labels, prior)
        return sum(y - level for y, level in labels) / (len(labels) + prior)

    level = {
        item: start + effect([(y, start) for y in labels], item_prior)
        for item, labels in of_item.items()
    }
    found = []
    for row in rows:
        support = [
            (one.label, level.get(one.ids[ITEM][0], start))
            for one in rows
            if one.episode == row.episode and one.is_support
        ]
        output = level.get(row.ids[ITEM][0], start) + effect(support, task_prior)
        found.append(1 / (1 + math.exp(-output)) if loss == "bce" else output)
    return found


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_predictions_equal_those_of_dictionaries(loss: Loss) -> None:
    train, cold = episode_rows(30, loss), episode_rows(12, loss, 2, 2000)
    cold.ids_NF[:5, ITEM] = 0  # an item that training never saw
    sums = sum_training_rows([train], FEATURES, 0)
    found = BiasModel(loss, ITEM, 3.0, 2.0).predict(sums, cold)
    expected = slow_predictions(loss, plain(train), plain(cold), 3.0, 2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("mean", [0.001, 0.05, 0.5, 0.99])
@pytest.mark.parametrize("prior", [PRIORS[0], PRIORS[3]])
def test_items_and_tasks_far_off_have_a_root_finders_effect(mean: float, prior: float) -> None:
    model, mu = BiasModel("bce", ITEM, prior, prior), math.log(mean / (1 - mean))
    shapes = [(20, 10), (10_000, 5_000), (100, 100), (100, 0)]
    counts_N, sums_N = np.array(shapes, dtype=np.float64).T
    found = model.fit_item_levels(counts_N, sums_N, mean) - mu
    expected = [
        root([(1.0, mu)] * clicks + [(0.0, mu)] * (rows - clicks), prior)
        for rows, clicks in [*shapes[:1], *shapes[2:]]
    ]
    np.testing.assert_allclose(found[[0, 2, 3]], expected, rtol=1e-8, atol=1e-8)
    # So many rows are all but their own mean.
    assert abs(found[1] + mu) < 0.05
    rows = episode_rows(3, "bce")
    rows = replace(rows, label_N=np.ones(rows.num_rows))
    effect_T = model.fit_task_effects(np.full(rows.num_rows, mu), rows)
    for episode, effect in enumerate(effect_T):
        support = int(rows.is_support_N[rows.episode_N == episode].sum())
        assert effect == pytest.approx(root([(1.0, mu)] * support, prior), rel=1e-8, abs=1e-8)


def test_the_sums_of_blocks_are_those_of_all_rows_and_folds_hold_whole_tasks() -> None:
    parts = [episode_rows(20, "mse", seed, 100 * seed) for seed in range(3)]
    sums = sum_training_rows(parts, FEATURES, 0)
    expected: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for part in parts:
        fold_T = assign_folds(part.task_T, 0)
        for row in plain(part):
            for column, ids in enumerate(row.ids):
                for one in ids:
                    expected[column, int(fold_T[row.episode]), one].append(row.label)
    for column, of_column in enumerate(sums.columns):
        for (fold, value), count in np.ndenumerate(of_column.sums_by_fold[..., 0]):
            labels = expected[column, fold, value]
            assert count == len(labels)
            assert of_column.sums_by_fold[fold, value, 1] == pytest.approx(sum(labels))
    assert sums.num_rows == sum(part.num_rows for part in parts)


def test_values_of_a_large_table_share_places_where_memory_ends() -> None:
    rows = episode_rows(20, "mse")
    sums = sum_training_rows([rows], FEATURES, 0, max_bytes=16 * 5 * 3 * 7)
    assert [column.sums_by_fold.shape[1] for column in sums.columns] == [6, 7, 7]
    whole = sum_training_rows([rows], FEATURES, 0).columns[ITEM].sums_by_fold[..., 0].sum(axis=0)
    shared = [whole[place::7].sum() for place in range(7)]
    assert sums.columns[ITEM].sums_by_fold[..., 0].sum(axis=0).tolist() == shared


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_the_priors_are_the_best_of_the_grid(loss: Loss) -> None:
    rows = episode_rows(60, loss)
    sums = sum_training_rows([rows], FEATURES, 0)
    chosen = choose_bias(loss, sums, [rows], ITEM, 0)
    # Each task judged with the items of the training rows of other folds.
    fold_T = assign_folds(rows.task_T, 0)
    query_N, fold_N = ~rows.is_support_N, fold_T[rows.episode_N]
    errors = {}
    for item_prior in (PRIORS[0], PRIORS[3], PRIORS[-1], chosen.item_prior):
        for task_prior in (PRIORS[0], PRIORS[3], PRIORS[-1], chosen.task_prior):
            predicted_N = np.zeros(rows.num_rows)
            for fold in set(fold_T.tolist()):
                others = sum_training_rows(
                    [rows.select_episodes(np.flatnonzero(fold_T != fold))], FEATURES, 0
                )
                # The mean is that of all rows, own ones too: one number of a whole split.
                model = BiasModel(loss, ITEM, item_prior, task_prior)
                counts, label_sums = others.columns[ITEM].leave_fold_out(
                    rows.ids_of(ITEM), np.full(rows.num_rows, -1)
                )
                level_N = model.fit_item_levels(counts, label_sums, sums.mean)
                output_N = model.output_N(level_N, rows)
                predicted_N[fold_N == fold] = output_N[fold_N == fold]
            if loss == "bce":
                predicted_N = 1 / (1 + np.exp(-predicted_N))
            judge = logloss if loss == "bce" else mae
            errors[item_prior, task_prior] = judge(rows.label_N[query_N], predicted_N[query_N])
    best = min(errors, key=lambda one: errors[one])
    assert (chosen.item_prior, chosen.task_prior) == best


def test_beside_scores_the_squared_error_of_labels_chooses() -> None:
    # Clicks as rare as they are: the absolute error would take the priors that shrink least.
    rows = episode_rows(60, "mse")
    rows = replace(rows, label_N=(rows.label_N > 5.2).astype(np.float64))
    assert 0.05 < rows.label_N.mean() < 0.2
    sums = sum_training_rows([rows], FEATURES, 0)
    chosen = choose_bias("softmax", sums, [rows], ITEM, 0)
    query_N, fold_N = ~rows.is_support_N, assign_folds(rows.task_T, 0)[rows.episode_N]

    def squared(item_prior: float, task_prior: float) -> float:
        model = BiasModel("softmax", ITEM, item_prior, task_prior)
        level_N = model.without_task(sums, rows.ids_of(ITEM), fold_N)
        left_N = (rows.label_N - model.output_N(level_N, rows))[query_N]
        return float(np.square(left_N).mean())

    best = min(itertools.product(PRIORS, PRIORS), key=lambda priors: squared(*priors))
    assert (chosen.item_prior, chosen.task_prior) == best
    by_rating = choose_bias("mse", sums, [rows], ITEM, 0)
    assert (by_rating.item_prior, by_rating.task_prior) != best


def test_groups_that_judge_count_alike() -> None:
    train = episode_rows(60, "mse")
    sums = sum_training_rows([train], FEATURES, 0)
    large, small = episode_rows(80, "mse", 1, 2000), episode_rows(6, "mse", 2, 4000)
    small.ids_NF[:, ITEM] = 0  # items that training never saw
    chosen = choose_bias("mse", sums, [large, small], ITEM, 0)

    def error_of(rows: EpisodeRows, item_prior: float, task_prior: float) -> float:
        model = BiasModel("mse", ITEM, item_prior, task_prior)
        fold_N = assign_folds(rows.task_T, 0)[rows.episode_N]
        level_N = model.without_task(sums, rows.ids_of(ITEM), fold_N)
        query_N = ~rows.is_support_N
        return mae(rows.label_N[query_N], model.output_N(level_N, rows)[query_N])

    errors = {
        (item_prior, task_prior): error_of(large, item_prior, task_prior)
        + error_of(small, item_prior, task_prior)
        for item_prior in PRIORS
        for task_prior in PRIORS
    }
    assert (chosen.item_prior, chosen.task_prior) == min(errors, key=lambda one: errors[one])
    alone = choose_bias("mse", sums, [large], ITEM, 0)
    assert (alone.item_prior, alone.task_prior) != (chosen.item_prior, chosen.task_prior)


def test_the_item_is_the_column_whose_means_predict_best() -> None:
    rows = episode_rows(60, "mse")
    sums = sum_training_rows([rows], FEATURES, 0)
    assert choose_bias("mse", sums, [rows], None, 0).item == ITEM
    assert choose_bias("mse", sums, [rows], 0, 0).item == 0  # as asked


def test_columns_that_say_nothing_are_no_item() -> None:
    rows = episode_rows(200, "mse")
    rng = np.random.default_rng(0)
    rows.ids_NF[:, 0] = rng.integers(0, 6, rows.num_rows)
    rows.ids_NF[:, ITEM] = rng.integers(0, 20, rows.num_rows)
    sums = sum_training_rows([rows], FEATURES, 0)
    model = choose_bias("mse", sums, [rows], None, 0)
    least = min(
        mae(rows.label_N, BiasModel("mse", NO_ITEM, 0.5, prior).predict(sums, rows))
        for prior in COARSE_PRIORS
    )
    if model.item != NO_ITEM:  # by chance: then it must be better than no item at all
        assert mae(rows.label_N, model.predict(sums, rows)) < least


def test_clicks_without_support_are_calibrated() -> None:
    rows = episode_rows(400, "bce")
    sums = sum_training_rows([rows], FEATURES, 0)
    nothing = rows.reorder(np.arange(rows.num_rows), np.zeros(len(rows.task_T), np.int64))
    probability = BiasModel("bce", ITEM, 0.5, 1.0).predict(sums, nothing)
    assert probability.mean() == pytest.approx(rows.label_N.mean(), abs=0.005)
