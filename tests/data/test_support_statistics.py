"""Statistics of support rows against a loop over dicts, and what a row must never see."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gmeta.config.inputs import ItemFeaturesConfig, LabelPrior, SupportFeaturesConfig
from gmeta.data.augment import resplit
from gmeta.data.features.support_statistics import NO_STATISTICS, SupportStatistics
from metaio.read.batch import empty_batch
from tests.support.reference import Task, batch_of, random_task, rows_left_out, some_features

PRIOR = LabelPrior(0.4, 0.5)
EVERYTHING = SupportFeaturesConfig(task=True, columns=("*",), shrinkage=2.0)


def statistics_of_row(
    task: Task, row: int, prior: LabelPrior, shrinkage: float, columns: tuple[int, int],
    foretold: Sequence[float] | None = None, in_groups: bool = False,
) -> list[float]:  # fmt: skip
    """All statistics of one row, from the definitions; `foretold` is of each row of the task."""
    left_out = rows_left_out(task.label, task.num_support, row, in_groups)
    others = [other for other in range(task.num_support) if other not in left_out]
    labels = [(task.label[other] - prior.mean) / prior.deviation for other in others]
    if foretold is not None:
        labels = [label - foretold[other] for label, other in zip(labels, others, strict=True)]

    def shrunken(values: list[float], towards: float) -> float:
        weight = len(values) + shrinkage
        return (sum(values) + shrinkage * towards) / weight if weight else towards

    def shown(count: int) -> float:
        return math.log(1 + count) / math.log(101)

    mean = shrunken(labels, 0.0)
    plain = sum(labels) / max(len(labels), 1)
    spread = math.sqrt(shrunken([(label - plain) ** 2 for label in labels], 1.0)) - 1
    found = [mean, shown(len(others)), spread]
    num_single, num_multi = columns
    for column in range(num_single + num_multi):

        def values_of(row: int, column: int = column) -> set[int]:
            if column < num_single:
                return {task.single[row][column]} - {0}
            return set(task.multi[row][column - num_single]) - {0}

        labels_of: dict[int, list[float]] = defaultdict(list)
        for other, label in zip(others, labels, strict=True):
            for value in values_of(other):
                labels_of[value].append(label)
        shared = [label for value in values_of(row) for label in labels_of[value]]
        found += [shrunken(shared, mean) - mean, shown(len(shared))]
    return found


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=5),
    columns=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    shared_table=st.booleans(),
    shrinkage=st.sampled_from([0.0, 0.5, 3.0]),
    in_groups=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_row_has_the_statistics_of_a_loop(
    sizes: list[tuple[int, int]], columns: tuple[int, int], shared_table: bool, shrinkage: float,
    in_groups: bool, seed: int,
) -> None:  # fmt: skip
    if sum(columns) == 0:
        columns = (1, 0)
    rng = random.Random(seed)
    features = some_features(*columns, 1, shared_table)
    tasks = [random_task(features, support, query, rng) for support, query in sizes]
    config = replace(EVERYTHING, shrinkage=shrinkage)
    features = replace(features, draws_negatives=in_groups)
    statistics = SupportStatistics.of(config, features, PRIOR)
    expected = [
        statistics_of_row(task, row, PRIOR, shrinkage, columns, in_groups=in_groups)
        for task in tasks
        for row in range(len(task.label))
    ]
    found_NK = statistics.features_NK(batch_of(tasks, features))
    assert found_NK.shape == (len(expected), statistics.width)
    if expected:
        np.testing.assert_allclose(found_NK, expected, rtol=1e-5, atol=1e-6)


FEATURES = some_features(2, 2, 1)
ITEMS = ItemFeaturesConfig(columns=("s1", "m0"))


def some_batch(seed: int = 0) -> list[Task]:
    rng = random.Random(seed)
    return [random_task(FEATURES, *sizes, rng) for sizes in ((6, 4), (1, 3), (9, 2))]


@pytest.mark.parametrize(("column", "place"), [("s1", 1), ("m0", 3)])
def test_labels_count_from_what_training_rows_say_of_a_column(column: str, place: int) -> None:
    """The dense inputs are one column of the data, then mean and number of s1, and of m0."""
    tasks = some_batch()
    config = replace(EVERYTHING, residual_of=column)
    statistics = SupportStatistics.of(config, FEATURES, PRIOR, ITEMS)
    batch = batch_of(tasks, FEATURES)
    dense_NK = torch.randn(batch.num_rows, 5, generator=torch.Generator().manual_seed(1))
    found_NK = statistics.features_NK(replace(batch, dense_NK=dense_NK))
    foretold = iter(dense_NK[:, place].tolist())
    expected = []
    for task in tasks:
        of_task = [next(foretold) for _ in task.label]
        expected += [
            statistics_of_row(task, row, PRIOR, EVERYTHING.shrinkage, (2, 2), of_task)
            for row in range(len(of_task))
        ]
    np.testing.assert_allclose(found_NK, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_groups", [False, True])
def test_of_log_odds_the_mean_is_what_clicks_lie_above_what_is_foretold(in_groups: bool) -> None:
    tasks, shrinkage = some_batch(), EVERYTHING.shrinkage
    config = replace(EVERYTHING, residual_of="s1")
    features = replace(FEATURES, draws_negatives=in_groups)
    statistics = SupportStatistics.of(config, features, PRIOR, replace(ITEMS, log_odds=True))
    batch = batch_of(tasks, FEATURES)
    dense_NK = torch.randn(batch.num_rows, 5, generator=torch.Generator().manual_seed(1))
    found_NK = statistics.features_NK(replace(batch, dense_NK=dense_NK))

    def logit(share: float) -> float:
        return math.log(share / (1 - share))

    foretold, expected = iter(dense_NK[:, 1].tolist()), []
    for task in tasks:
        shares = [1 / (1 + math.exp(-logit(PRIOR.mean) - next(foretold))) for _ in task.label]
        above = [(share - PRIOR.mean) / PRIOR.deviation for share in shares]
        for row in range(len(shares)):
            left_out = rows_left_out(task.label, task.num_support, row, in_groups)
            others = [other for other in range(task.num_support) if other not in left_out]
            weight, prior = len(others) + shrinkage, shrinkage * PRIOR.mean
            of_clicks = (sum(task.label[other] for other in others) + prior) / weight
            of_foretold = (sum(shares[other] for other in others) + prior) / weight
            rest = statistics_of_row(task, row, PRIOR, shrinkage, (2, 2), above, in_groups)[1:]
            expected.append([logit(of_clicks) - logit(of_foretold), *rest])
    np.testing.assert_allclose(found_NK, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("items", "told"), [(ITEMS, "s1, m0"), (ItemFeaturesConfig(), "none")])
def test_labels_count_from_no_column_that_is_no_input(items: ItemFeaturesConfig, told: str) -> None:
    with pytest.raises(ValueError) as raised:
        SupportStatistics.of(replace(EVERYTHING, residual_of="s0"), FEATURES, PRIOR, items)
    assert str(raised.value) == (
        "support_features.residual_of: 's0' is none of the columns that item_features.columns "
        f'chooses: {told}. Name one of them, add it there, or leave the key out: ""'
    )


def test_labels_that_nothing_is_made_of_count_from_no_column() -> None:
    with pytest.raises(ValueError) as raised:
        SupportStatistics.of(SupportFeaturesConfig(residual_of="s1"), FEATURES, PRIOR, ITEMS)
    assert str(raised.value) == (
        "support_features.residual_of: 's1' changes nothing without support_features.task or "
        'support_features.columns. Set one of them, or leave the key out: ""'
    )


def test_no_row_sees_its_own_label_nor_that_of_a_query_row() -> None:
    statistics = SupportStatistics.of(EVERYTHING, FEATURES, PRIOR)
    batch = batch_of(some_batch(), FEATURES)
    before_NK = statistics.features_NK(batch)
    for row in range(batch.num_rows):
        changed = batch.label_N.clone()
        changed[row] = 100.0
        after_NK = statistics.features_NK(replace(batch, label_N=changed))
        np.testing.assert_array_equal(after_NK[row], before_NK[row])
        is_support = row < 6 or row == 10 or 14 <= row < 23  # of tasks of 6 + 4, 1 + 3, 9 + 2
        assert (after_NK != before_NK).any() == is_support


def test_labels_of_query_rows_may_be_unknown() -> None:
    statistics = SupportStatistics.of(EVERYTHING, FEATURES, PRIOR)
    batch = batch_of(some_batch(), FEATURES)
    label_N = batch.label_N.clone()
    label_N[6:10] = math.nan
    np.testing.assert_array_equal(
        statistics.features_NK(replace(batch, label_N=label_N)), statistics.features_NK(batch)
    )


def test_all_are_zero_where_nothing_is_known() -> None:
    task = random_task(FEATURES, 0, 5, random.Random(3))
    statistics = SupportStatistics.of(EVERYTHING, FEATURES, PRIOR)
    assert not statistics.features_NK(batch_of([task], FEATURES)).any()


def test_they_follow_the_support_that_training_draws_anew() -> None:
    tasks = some_batch()
    statistics = SupportStatistics.of(EVERYTHING, FEATURES, PRIOR)
    batch = batch_of(tasks, FEATURES)
    redrawn = resplit(batch, 0.2, 0.8, key=5)
    before_N6, after_N6 = (statistics.features_NK(each)[:, :3] for each in (batch, redrawn))
    lengths = redrawn.support_lengths_T.tolist()
    # A query row's task count is that of the new support.
    ends = redrawn.row_offsets_T1[1:] - 1
    shown = np.log1p(lengths) / np.log(101.0)
    np.testing.assert_allclose(after_N6[ends.numpy(), 1], shown, rtol=1e-6)
    assert lengths != [6, 1, 9]
    assert (before_N6 != after_N6).any()


def test_they_stand_behind_the_dense_columns() -> None:
    batch = batch_of(some_batch(), FEATURES)
    config = SupportFeaturesConfig(columns=("m1", "s*"))
    statistics = SupportStatistics.of(config, FEATURES, PRIOR)
    assert statistics.names == ("s0 mean", "s0 count", "s1 mean", "s1 count", "m1 mean", "m1 count")
    widened = statistics.with_features(batch)
    assert widened.dense_NK.dtype == batch.dense_NK.dtype
    assert torch.equal(widened.dense_NK[:, :1], batch.dense_NK)
    np.testing.assert_array_equal(
        widened.dense_NK[:, 1:].float(), torch.from_numpy(statistics.features_NK(batch))
    )
    assert NO_STATISTICS.with_features(batch) is batch
    nothing = statistics.with_features(empty_batch(4, 2, 2, 1))
    assert nothing.dense_NK.shape == (0, 7)


def test_an_unknown_column_is_named() -> None:
    with pytest.raises(ValueError) as raised:
        SupportStatistics.of(SupportFeaturesConfig(columns=("genre",)), FEATURES, PRIOR)
    assert str(raised.value) == (
        "support_features.columns: 'genre' matches no sparse column; this dataset has s0, s1, m0, "
        'm1. Name some of them, "*" for all, or none at all: []'
    )


def test_the_prior_of_labels_without_spread_or_of_none_has_a_unit() -> None:
    assert LabelPrior.of(np.array([3.0, 3.0], np.float32)) == (3.0, 1.0)
    assert LabelPrior.of(np.zeros(0, np.float32)) == (0.0, 1.0)
    assert LabelPrior.of(np.array([1.0, 3.0], np.float32)) == (2.0, 1.0)
