"""Statistics of training rows against a loop over dicts, and what a row must never see."""

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

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import ItemFeaturesConfig
from gmeta.data.features.item_statistics import MOST_VALUES, ItemStatistics
from gmeta.data.sums import NUM_FOLDS
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.format.features import TableSpec
from metaio.hashing import splitmix64
from metaio.read.batch import TaskBatch, empty_batch
from tests.support.reference import Task, batch_of, random_task, some_features

FEATURES = some_features(2, 2, 1)
EVERYTHING = ItemFeaturesConfig(columns=("*",), shrinkage=2.0)
SIZES = ((6, 4), (1, 3), (9, 2), (0, 5), (4, 0), (3, 3), (2, 2))


def fold_of(task: int) -> int:
    return int(splitmix64(np.uint64(task ^ 0x17E3))) % NUM_FOLDS


def logit(share: float) -> float:
    inside = min(max(share, 1e-6), 1 - 1e-6)
    return math.log(inside / (1 - inside))


def values_of(task: Task, row: int, column: int, num_single: int) -> list[int]:
    """The known ids of a row, repeats kept."""
    ids = (
        [task.single[row][column]]
        if column < num_single
        else task.multi[row][column - num_single]
    )  # fmt: skip
    return [one for one in ids if one]


class Told:
    """Mean and deviation of labels, and the labels above that of the rows with each id; how many
    times as many rows there are in all."""

    def __init__(
        self, rows: Sequence[tuple[Task, int]], columns: int, num_single: int, num_all: int
    ) -> None:
        self.of_all = num_all / max(len(rows), 1)
        labels = [task.label[row] for task, row in rows]
        self.mean = sum(labels) / max(len(labels), 1)
        variance = sum((label - self.mean) ** 2 for label in labels) / max(len(labels), 1)
        self.deviation = math.sqrt(variance) if variance > 1e-12 else 1.0
        self.of_value: list[dict[int, list[float]]] = [defaultdict(list) for _ in range(columns)]
        for task, row in rows:
            for column, of_value in enumerate(self.of_value):
                for one in values_of(task, row, column, num_single):
                    of_value[one].append((task.label[row] - self.mean) / self.deviation)


def statistics_of_row(
    told: Told, values: list[list[int]], shrinkage: float, log_odds: bool
) -> list[float]:
    """All statistics of a row with these values, from what it is told of."""
    found = []
    for of_value, ids in zip(told.of_value, values, strict=True):
        means = [sum(of_value[one]) / max(len(of_value[one]) + shrinkage, 1e-12) for one in ids]
        if log_odds:
            means = [logit(told.mean + far * told.deviation) - logit(told.mean) for far in means]
        counts = [math.log(1 + told.of_all * len(of_value[one])) / math.log(101) for one in ids]
        found += [sum(each) / max(len(each), 1) for each in (means, counts)]
    return found


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=9),
    columns=st.tuples(st.integers(0, 2), st.integers(0, 2)), shared_table=st.booleans(),
    shrinkage=st.sampled_from([0.0, 0.5, 3.0]), log_odds=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_every_row_has_the_statistics_of_a_loop(
    sizes: list[tuple[int, int]], columns: tuple[int, int], shared_table: bool, shrinkage: float,
    log_odds: bool, seed: int,
) -> None:  # fmt: skip
    if sum(columns) == 0:
        columns = (1, 0)
    rng = random.Random(seed)
    features = some_features(*columns, 1, shared_table)
    tasks = [random_task(features, support, query, rng) for support, query in sizes]
    config = replace(EVERYTHING, shrinkage=shrinkage, log_odds=log_odds)
    items = ItemStatistics(config, features)
    batch = batch_of(tasks, features)
    sums = items.empty_sums()
    half = len(tasks) // 2
    for part in (batch.tasks(0, half), batch.tasks(half, len(tasks))):
        items.add(sums, part)
    items.set_from_sums(sums)
    every = [(at, task, row) for at, task in enumerate(tasks) for row in range(len(task.label))]
    for to_train in (True, False):
        told_by = items.fold_statistics() if to_train else items
        found = told_by.with_features(batch).dense_NK[:, 1:].numpy()
        assert found.shape == (len(every), items.width)
        # All rows of a fold are told of the same ones.
        told = {
            fold: Told(
                [(other, its) for at, other, its in every if not to_train or fold_of(at) != fold],
                sum(columns),
                columns[0],
                len(every),
            )
            for fold in {fold_of(index) for index, _, _ in every}
        }
        expected = [
            statistics_of_row(
                told[fold_of(index)],
                [values_of(task, row, each, columns[0]) for each in range(sum(columns))],
                shrinkage,
                log_odds,
            )
            for index, task, row in every
        ]
        wanted = np.array(expected, np.float64).reshape(found.shape)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def some_batch(seed: int = 0) -> TaskBatch:
    rng = random.Random(seed)
    return batch_of([random_task(FEATURES, *sizes, rng) for sizes in SIZES], FEATURES)


def filled(batch: TaskBatch) -> ItemStatistics:
    items = ItemStatistics(EVERYTHING, FEATURES)
    sums = items.empty_sums()
    items.add(sums, batch)
    items.set_from_sums(sums)
    return items


def test_no_training_row_sees_a_label_of_its_own_task() -> None:
    batch = some_batch()
    before_NK = filled(batch).fold_statistics().with_features(batch).dense_NK
    task_N = torch.repeat_interleave(batch.task_T, batch.row_offsets_T1.diff())
    assert len({fold_of(task) for task in batch.task_T.tolist()}) > 1
    for row in range(batch.num_rows):
        changed = batch.label_N.clone()
        changed[row] = 0.37
        after_NK = (
            filled(replace(batch, label_N=changed)).fold_statistics().with_features(batch).dense_NK
        )
        same_N = (after_NK == before_NK).all(dim=1)
        assert same_N[task_N == task_N[row]].all()
        assert not same_N.all()


def test_rows_that_are_predicted_tell_nothing() -> None:
    """Neither their labels nor that they are there: what they see is of the training rows."""
    items, unseen = filled(some_batch()), some_batch(seed=1)
    before_NK = items.with_features(unseen).dense_NK
    unknown = replace(unseen, label_N=torch.full_like(unseen.label_N, math.nan))
    assert torch.equal(items.with_features(unknown).dense_NK, before_NK)
    alone = torch.cat([items.with_features(unseen.tasks(at, at + 1)).dense_NK for at in range(7)])
    assert torch.equal(alone, before_NK)


def test_a_value_that_no_training_row_has_is_zero() -> None:
    items, batch = filled(some_batch().tasks(0, 1)), some_batch()
    held = set(batch.unique_ids_U[batch.positions_NF[:10, 1].long()].tolist())
    assert not {0, 1, 2, 3} <= held
    new = replace(batch, unique_ids_U=torch.zeros_like(batch.unique_ids_U))
    assert not items.with_features(new).dense_NK[:, 1:].any()
    ids_N = batch.unique_ids_U[batch.positions_NF[:, 1].long()]
    lacking_N = torch.tensor([one not in held for one in ids_N.tolist()])
    assert lacking_N.any()
    assert not items.with_features(batch).dense_NK[lacking_N, 3:5].any()


def test_a_learner_trains_without_its_own_fold_and_predicts_with_all() -> None:
    batch = some_batch()
    model = ModelConfig("melu", 4, hidden=(5,), options={"bottom": (3,)})
    algorithm = AlgorithmConfig("none")
    learner = build_learner(FEATURES, model, algorithm, "mse", item_features=EVERYTHING)
    with pytest.raises(ValueError, match="were not taken from training rows"):
        learner.collate(batch)
    assert learner.items is not None
    sums = learner.items.empty_sums()
    learner.items.add(sums, batch)
    learner.items.set_from_sums(sums)
    wanted = learner.items.fold_statistics().with_features(batch).dense_NK
    assert torch.equal(learner.collate(batch).rows.dense_NK, wanted)  # type: ignore[union-attr]
    support_N = torch.cat([torch.arange(sum(size)) < size[0] for size in SIZES])
    sides = learner.collate_to_predict(batch).rows
    wanted = learner.items.with_features(batch).dense_NK
    assert torch.equal(sides.support.dense_NK, wanted[support_N])  # type: ignore[union-attr]
    assert torch.equal(sides.query.dense_NK, wanted[~support_N])  # type: ignore[union-attr]
    # A checkpoint or an export holds what predictions need.
    other = build_learner(FEATURES, model, algorithm, "mse", item_features=EVERYTHING)
    other.load_state_dict(learner.state_dict())
    rows = other.collate_to_predict(batch).rows
    assert torch.equal(rows.query.dense_NK, wanted[~support_N])  # type: ignore[union-attr]


def test_a_rank_without_tasks_has_no_rows() -> None:
    items = filled(some_batch())
    for told_by in (items, items.fold_statistics()):
        nothing = told_by.with_features(empty_batch(len(FEATURES.tables), 2, 2, 1))
        assert nothing.dense_NK.shape == (0, 1 + items.width)


def test_columns_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        ItemStatistics(ItemFeaturesConfig(columns=("shop",)), FEATURES)
    assert str(caught.value) == (
        "item_features.columns: 'shop' matches no sparse column; this dataset has s0, s1, m0, m1. "
        'Name some of them, "*" for all, or none at all: []'
    )
    large = replace(FEATURES, tables=(TableSpec("s0", MOST_VALUES + 1), *FEATURES.tables[1:]))
    with pytest.raises(ValueError) as caught:
        ItemStatistics(ItemFeaturesConfig(columns=("s*",)), large)
    assert str(caught.value) == (
        "item_features.columns: s0 has a table of 8,388,609 rows; at most 8,388,608 are allowed. "
        "Leave the column out"
    )
