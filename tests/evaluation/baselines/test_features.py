"""Statistics of support and columns against a loop over rows, and what they must not know."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gmeta.config.inputs import LabelPrior, NeighboursConfig
from gmeta.config.losses import Loss
from gmeta.data.features.neighbours import NAMES
from gmeta.data.sums import NUM_FOLDS
from gmeta.evaluation.baselines.bias_model import BiasModel
from gmeta.evaluation.baselines.episode_rows import EpisodeRows, find_item_columns
from gmeta.evaluation.baselines.training_sums import NO_FOLD, assign_folds, sum_training_rows
from gmeta.evaluation.baselines.tree_features import (
    SHARED_PRIOR,
    VALUE_PRIOR,
    StatisticsMaker,
    TreeNeighbours,
)
from tests.evaluation.baselines.sample import FEATURES, ITEM, PlainRow, episode_rows, mean, plain


def known_of(rows: EpisodeRows, loss: Loss) -> StatisticsMaker:
    sums = sum_training_rows([rows], FEATURES, 0)
    bias = BiasModel(loss, ITEM, 2.0, 3.0)
    return StatisticsMaker(sums, FEATURES, bias, find_item_columns(rows, FEATURES, ITEM))


def slow_statistics(
    train: list[PlainRow], rows: list[PlainRow], unseen: list[bool], loss: Loss, folded: bool
) -> list[dict[str, float]]:
    """The statistics of each query row, by looking at all rows for each."""
    overall = mean([row.label for row in train])
    fold = {row.task: int(assign_folds(np.array([row.task]), 0)[0]) for row in [*train, *rows]}
    model = BiasModel(loss, ITEM, 2.0, 3.0)

    def others(row: PlainRow) -> list[PlainRow]:
        return [one for one in train if not folded or fold[one.task] != fold[row.task]]

    def level(row: PlainRow) -> float:
        labels = [one.label for one in others(row) if one.ids[ITEM] == row.ids[ITEM]]
        return float(
            model.fit_item_levels(np.array([len(labels)]), np.array([sum(labels)]), overall)[0]
        )

    def shown(output: float) -> float:
        return 1 / (1 + math.exp(-output)) if loss == "bce" else output

    found = []
    for row, is_unseen in zip(rows, unseen, strict=True):
        if row.is_support:
            continue
        support = [one for one in rows if one.episode == row.episode and one.is_support]
        labels = [one.label for one in support]
        values = {"support rows": len(support), "support mean": mean(labels)}
        values["support deviation"] = math.sqrt(mean([(y - mean(labels)) ** 2 for y in labels]))
        for column, name in enumerate(("maker", "item", "tags")):
            means = []
            for value in row.ids[column]:
                same = [one for one in others(row) if value in one.ids[column]]
                if is_unseen:
                    same = [one for one in same if one.ids[ITEM] != row.ids[ITEM]]
                total = sum(one.label * one.ids[column].count(value) for one in same)
                count = sum(one.ids[column].count(value) for one in same)
                means.append((total + VALUE_PRIOR * overall) / (count + VALUE_PRIOR))
                if column == ITEM:
                    values["item: rows"] = count * (1.25 if folded else 1.0)
            values[f"{name}: mean"] = mean(means)
            above = [
                one.label - shown(level(one))
                for value in row.ids[column]
                for one in support
                for other in one.ids[column]
                if other == value
            ]
            values[f"{name}: shared"] = len(above)
            values[f"{name}: shared mean"] = sum(above) / (len(above) + SHARED_PRIOR)
        found.append(values)
    return found


@pytest.mark.parametrize("loss", ["bce", "mse"])
@pytest.mark.parametrize("of_training", [False, True])
def test_statistics_equal_those_of_a_loop(loss: Loss, of_training: bool) -> None:
    train = episode_rows(25, loss)
    rows = train if of_training else episode_rows(10, loss, 2, 2000)
    known = known_of(train, loss)
    unseen_N = np.random.default_rng(3).random(rows.num_rows) < 0.4
    fold_N = assign_folds(rows.task_T, 0)[rows.episode_N] if of_training else _no_fold(rows)
    given = known.make_statistics(rows, fold_N, unseen_N)
    slow = slow_statistics(plain(train), plain(rows), unseen_N.tolist(), loss, of_training)
    assert len(slow) == len(given.label_N)
    for name in slow[0]:
        expected = [row[name] for row in slow]
        found_N = given.values_NX[:, given.names.index(name)]
        np.testing.assert_allclose(found_N, expected, rtol=1e-9, atol=1e-12, err_msg=name)
    assert set(given.names) - set(slow[0]) == {"task bias", "price (dense)"}


def test_no_statistic_of_a_row_depends_on_a_label_of_its_own_side() -> None:
    train, rows = episode_rows(25, "mse"), episode_rows(10, "mse", 2, 2000)
    known = known_of(train, "mse")
    before = known.make_statistics(rows, _no_fold(rows))
    rows.label_N[~rows.is_support_N] += 100.0
    after = known.make_statistics(rows, _no_fold(rows))
    np.testing.assert_array_equal(before.values_NX, after.values_NX)
    np.testing.assert_array_equal(before.start_N, after.start_N)


def test_a_training_task_is_told_nothing_of_its_own_fold() -> None:
    train = episode_rows(25, "mse")
    fold_N = assign_folds(train.task_T, 0)[train.episode_N]
    before = known_of(train, "mse").make_statistics(train, fold_N)
    mine = fold_N == 0
    train.label_N[mine & ~train.is_support_N] += 100.0
    after_known = known_of(train, "mse")
    after = after_known.make_statistics(train, fold_N)
    kept = fold_N[~train.is_support_N] == 0
    # All but the overall mean, which is one number of the whole split.
    counts = [after.names.index(name) for name in ("item: rows", "tags: shared", "support mean")]
    np.testing.assert_array_equal(
        before.values_NX[kept][:, counts], after.values_NX[kept][:, counts]
    )
    column = after.names.index("item: mean")
    counted = after.values_NX[kept][:, after.names.index("item: rows")] / 1.25
    moved = after_known.sums.mean - known_of(episode_rows(25, "mse"), "mse").sums.mean
    np.testing.assert_allclose(
        after.values_NX[kept][:, column] - before.values_NX[kept][:, column],
        VALUE_PRIOR * moved / (counted + VALUE_PRIOR),
        rtol=1e-9,
    )


def test_what_follows_from_the_item_describes_it() -> None:
    rows = episode_rows(60, "mse")
    assert find_item_columns(rows, FEATURES, ITEM) == (True, True, True)
    rows.ids_NF[:, 0] = np.random.default_rng(0).integers(0, 6, rows.num_rows)
    assert find_item_columns(rows, FEATURES, ITEM) == (False, True, True)


def test_rows_of_unknown_items_and_items_of_one_row_tell_nothing_of_what_describes_them() -> None:
    rows = episode_rows(60, "mse")
    rows.ids_NF[::10, ITEM] = 0  # whatever the vocabulary lacks
    assert find_item_columns(rows, FEATURES, ITEM) == (True, True, True)
    rows.ids_NF[:, ITEM] = np.arange(rows.num_rows)
    assert find_item_columns(rows, FEATURES, ITEM) == (False, True, False)


def _no_fold(rows: EpisodeRows) -> np.ndarray:
    return np.full(rows.num_rows, NO_FOLD)


@pytest.mark.parametrize("is_known", [True, False])
def test_trees_have_neighbours_of_the_folds_that_a_task_is_not_in(is_known: bool) -> None:
    rows, prior = episode_rows(40, "bce"), LabelPrior(0.4, 0.5)
    known = known_of(rows, "bce")
    near = TreeNeighbours.count([rows], FEATURES, NeighboursConfig("item", 6), prior, 0)
    assert near is not None
    folds = assign_folds(rows.task_T, 0)[rows.episode_N]
    fold_N = folds if is_known else np.full(rows.num_rows, NO_FOLD)
    unseen_N = np.arange(rows.num_rows) % 5 == 0
    before = known.make_statistics(rows, fold_N, unseen_N)
    given = replace(known, neighbours=near).make_statistics(rows, fold_N, unseen_N)
    assert given.names == (*before.names, *NAMES)
    np.testing.assert_array_equal(given.values_NX[:, :-6], before.values_NX)
    # Together, and of these above and below the mean, without the last step of each.
    found = np.sinh(given.values_NX[:, [-4, -2, -1]]) / 10
    query = np.flatnonzero(~rows.is_support_N)
    for row, values in zip(query.tolist(), found, strict=True):
        level, item = fold_N[row] if is_known else NUM_FOLDS, int(rows.ids_NF[row, ITEM])
        weight_of = dict(
            zip(near.lists.ids[level, item], near.lists.weights[level, item, :, 0], strict=True)
        )
        support = np.flatnonzero((rows.episode_N == rows.episode_N[row]) & rows.is_support_N)
        expected = np.zeros(3)
        for other in support.tolist() if not unseen_N[row] else []:
            weight = float(weight_of.get(rows.ids_NF[other, ITEM], 0.0)) / math.sqrt(len(support))
            is_above = rows.label_N[other] > 0.4
            expected += [weight, weight * is_above, weight * (not is_above)]
        np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-12)
    assert np.count_nonzero(found[:, 0]) > len(query) / 3
