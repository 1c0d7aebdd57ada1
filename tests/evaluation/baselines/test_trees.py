"""The trees learn what the bias model cannot say, from draws that obey the stored rule."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from gmeta.config.losses import Loss
from gmeta.data.row_groups import find_groups
from gmeta.evaluation.baselines import boosted_trees as trees
from gmeta.evaluation.baselines.bias_model import BiasModel, mean_error, sigmoid
from gmeta.evaluation.baselines.episode_rows import EpisodeRows, find_item_columns
from gmeta.evaluation.baselines.training_sums import NO_FOLD, assign_folds, sum_training_rows
from gmeta.evaluation.baselines.tree_features import StatisticsMaker
from tests.evaluation.baselines.sample import FEATURES, ITEM, episode_rows

# Not imported here: each worker, which collects all tests, would import scikit-learn with it.
pytestmark = pytest.mark.skipif(find_spec("lightgbm") is None, reason="needs lightgbm, an extra")


def known_of(train: EpisodeRows, loss: Loss) -> StatisticsMaker:
    sums = sum_training_rows([train], FEATURES, 0)
    bias = BiasModel(loss, ITEM, 2.0, 3.0)
    return StatisticsMaker(sums, FEATURES, bias, find_item_columns(train, FEATURES, ITEM))


def with_price_effect(rows: EpisodeRows, loss: Loss) -> EpisodeRows:
    """Labels that the dense column decides as well."""
    price_N = rows.dense_NK[:, 0]
    label_N = rows.label_N + 2.0 * price_N if loss != "bce" else (price_N > 0.5).astype(np.float64)
    rows.label_N[:] = label_N
    return rows


@pytest.mark.parametrize("loss", ["bce", "mse", "huber", "mae"])
def test_trees_beat_the_bias_model_by_what_only_a_feature_tells(loss: Loss) -> None:
    train = with_price_effect(episode_rows(150, loss), loss)
    cold = with_price_effect(episode_rows(100, loss, 2, 2000), loss)
    known = known_of(train, loss)
    grown = trees.grow_trees(loss, known, train, [], False, 0, max_trees=60)
    assert grown is not None
    query_N = ~cold.is_support_N
    label_N = cold.label_N[query_N]
    of_trees = mean_error(loss, label_N, grown.predict(known, cold))
    of_bias = mean_error(loss, label_N, known.bias.predict(known.sums, cold)[query_N])
    assert of_trees < 0.9 * of_bias
    again = trees.grow_trees(loss, known, train, [], False, 0, max_trees=60)
    assert again is not None
    np.testing.assert_array_equal(grown.predict(known, cold), again.predict(known, cold))


def test_huber_s_loss_is_squared_as_far_as_the_run_s() -> None:
    """Of large labels, such as prices, steps as of a delta of 1 would be nothing."""
    train = episode_rows(60, "mse")
    found = []
    for scale in (1.0, 1024.0):  # a power of two changes no digit
        scaled = replace(train, label_N=train.label_N * scale)
        known = known_of(scaled, "huber")
        grown = trees.grow_trees("huber", known, scaled, [], False, 0, scale, max_trees=20)
        assert grown is not None
        found.append(grown.predict(known, scaled) / scale)
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_fractions_of_clicks_are_no_clicks() -> None:
    train, cold = episode_rows(150, "bce"), episode_rows(100, "bce", 2, 2000)
    for rows in (train, cold):
        rows.label_N[:] = np.where(rows.dense_NK[:, 0] > 0.5, 0.3, 0.1)
    known = known_of(train, "bce")
    grown = trees.grow_trees("bce", known, train, [], False, 0, max_trees=60)
    assert grown is not None
    label_N = cold.label_N[~cold.is_support_N]
    assert np.abs(grown.predict(known, cold) - label_N).mean() < 0.03


def test_what_is_chosen_is_the_best_of_the_grid_on_the_validation_tasks() -> None:
    train, valid = episode_rows(200, "bce"), episode_rows(80, "bce", 1, 1000)
    known = known_of(train, "bce")
    grown = trees.grow_trees("bce", known, train, [valid], False, 0, max_trees=60)
    assert grown is not None
    judged = known.make_statistics(valid, assign_folds(valid.task_T, 0)[valid.episode_N])
    # The same data, grown and judged here, tree by tree.
    import lightgbm

    given, _ = trees.make_training_statistics(known, train, False, 0)

    def best_of(setting: trees.TreeSetting) -> tuple[float, int]:
        """The smallest loss, and after how many trees."""
        chosen = {"num_leaves": setting.leaves, "min_data_in_leaf": setting.leaf_rows}
        booster = lightgbm.train(
            {**trees.FIXED, "objective": "binary", **chosen, "learning_rate": setting.rate},
            lightgbm.Dataset(given.values_NX, given.label_N, init_score=given.start_N),
            num_boost_round=60,
        )
        raws = (
            booster.predict(judged.values_NX, raw_score=True, num_iteration=count)
            for count in range(1, 61)
        )
        losses = [
            mean_error("bce", judged.label_N, sigmoid(judged.start_N + raw_N)) for raw_N in raws
        ]
        return min(losses), int(np.argmin(losses)) + 1

    expected = trees.TreeSetting()
    for key, values in trees.GRID.items():
        settings = [replace(expected, **{key: value}) for value in values]
        expected = min(settings, key=best_of)
    assert (grown.setting, grown.num_tried) == (expected, 7)
    assert grown.num_trees == best_of(expected)[1]


def test_groups_that_judge_weigh_alike_however_many_rows_they_have() -> None:
    train = with_price_effect(episode_rows(200, "mse"), "mse")
    # Many tasks that like what training says, few whose labels it knows nothing of.
    groups = [
        with_price_effect(episode_rows(80, "mse", 1, 1000), "mse"),
        episode_rows(8, "mse", 2, 3000),
    ]
    known = known_of(train, "mse")
    import lightgbm

    given, _ = trees.make_training_statistics(known, train, False, 0)
    booster = lightgbm.train(
        trees._make_parameters(trees.OBJECTIVES["mse"], trees.TreeSetting()),
        trees._make_dataset(lightgbm, given),
        num_boost_round=60,
    )
    judged = [
        known.make_statistics(rows, assign_folds(rows.task_T, 0)[rows.episode_N]) for rows in groups
    ]

    def loss_after(count: int) -> tuple[float, float]:
        """The mean over groups, and that over rows."""
        squares = [
            np.square(
                one.label_N
                - one.start_N
                - booster.predict(one.values_NX, raw_score=True, num_iteration=count)
            )
            for one in judged
        ]
        return float(np.mean([s.mean() for s in squares])), float(np.concatenate(squares).mean())

    losses = [loss_after(count) for count in range(1, 61)]
    by_group, by_row = (int(np.argmin(column)) + 1 for column in zip(*losses, strict=True))
    assert by_group != by_row
    grown = trees.grow_trees(
        "mse", known, train, groups, False, 0, grid={"rate": (0.1,)}, max_trees=60
    )
    assert grown is not None
    assert grown.num_trees == by_group


@pytest.mark.parametrize("past", [False, True])
def test_a_draw_has_as_many_query_rows_of_each_task_and_the_past_stays_past(past: bool) -> None:
    rows = episode_rows(50, "mse")
    drawn = trees.redraw_support(rows, 1, past, 0)
    before = np.diff(rows.row_offsets_T1) - rows.support_lengths_T
    after = np.diff(drawn.row_offsets_T1) - drawn.support_lengths_T
    assert after.tolist() == before.tolist()
    for episode in range(50):
        first, last = rows.row_offsets_T1[episode : episode + 2]
        start, end = drawn.row_offsets_T1[episode : episode + 2]
        own, drawn_own = rows.label_N[first:last], drawn.label_N[start:end]
        if past:
            assert drawn_own.tolist() == own[: end - start].tolist()
        else:
            assert sorted(drawn_own) == sorted(own)
    if not past:
        assert drawn.support_lengths_T.tolist() == rows.support_lengths_T.tolist()
        assert drawn.label_N.tolist() != rows.label_N.tolist()
    else:
        assert (drawn.support_lengths_T <= rows.support_lengths_T).all()
        assert (drawn.support_lengths_T < rows.support_lengths_T).any()


def test_the_stored_draw_is_the_first() -> None:
    rows = episode_rows(5, "mse")
    assert trees.redraw_support(rows, 0, False, 0) is rows


def test_tasks_without_query_rows_grow_nothing() -> None:
    rows = episode_rows(5, "mse")
    known = known_of(rows, "mse")
    nothing = rows.reorder(np.arange(rows.num_rows), np.diff(rows.row_offsets_T1))
    assert trees.grow_trees("mse", known, nothing, [], False, 0) is None


def test_predictions_without_a_tree_are_those_of_the_bias_model() -> None:
    train, cold = episode_rows(60, "bce"), episode_rows(10, "bce", 2, 2000)
    known = known_of(train, "bce")
    none = trees.BoostedTrees("bce", None, trees.TreeSetting(), 0, 0, 0, 0)
    expected = known.bias.predict(known.sums, cold)[~cold.is_support_N]
    np.testing.assert_allclose(none.predict(known, cold), expected, rtol=1e-12)
    assert NO_FOLD == -1


@pytest.mark.parametrize("past", [False, True])
def test_a_draw_keeps_a_positive_and_the_negatives_drawn_for_it_together(past: bool) -> None:
    rows = episode_rows(50, "mse")
    # Which row it is, as a label: every third is a positive, as every side's first is.
    number_N = np.arange(rows.num_rows)
    rows = replace(rows, label_N=np.where(number_N % 3 == 0, number_N + 1.0, -number_N))
    group_N = find_groups(rows)
    moved = 0
    for draw in range(1, 4):
        drawn = trees.redraw_support(rows, draw, past, 0, in_groups=True)
        row_N = np.where(drawn.label_N > 0, drawn.label_N - 1, -drawn.label_N).astype(np.int64)
        support_N = drawn.is_support_N
        assert not set(group_N[row_N[support_N]]) & set(group_N[row_N[~support_N]])
        moved += int((row_N != number_N[: len(row_N)]).sum())
    assert moved
