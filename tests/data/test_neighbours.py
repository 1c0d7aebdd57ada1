"""Neighbours against a dense calculation, their features against a loop, and that nothing leaks."""

import errno
import math
import os
import pickle
import random
import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gmeta.adaptation.layout.sides import Side, WorkingRows
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import (
    ItemFeaturesConfig,
    LabelPrior,
    NeighboursConfig,
    SupportFeaturesConfig,
)
from gmeta.config.labels import LabelsConfig
from gmeta.data.episodes import Episodes
from gmeta.data.neighbour_counts import (
    MOST_ITEMS,
    Baskets,
    NeighbourLists,
    _count_pairs,
    count_neighbours,
)
from gmeta.data.sums import NUM_FOLDS, Floats, find_folds
from gmeta.errors import NotWrittenError
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner, build_statistics
from gmeta_models import ModelConfig
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.ragged import Int64
from metaio.read.batch import TaskBatch, empty_batch
from tests.support.reference import Task, batch_of, rows_left_out
from tests.support.refusals import catch_message

NUM_ITEMS, MANY_ITEMS = 12, 80
FEATURES, WIDE = (
    Features(
        tables=(TableSpec("user", 3), TableSpec("item", num_items)),
        single=(FeatureSpec("user", "user"), FeatureSpec("item", "item")),
        multi=(),
        dense=(),
    )
    for num_items in (NUM_ITEMS, MANY_ITEMS)
)
PRIOR = LabelPrior(0.4, 0.7)


def some_tasks(sizes: list[tuple[int, int]], seed: int, num_items: int = NUM_ITEMS) -> list[Task]:
    rng = random.Random(seed)
    return [
        Task(
            single=[[rng.randrange(3), rng.randrange(num_items)] for _ in range(support + query)],
            multi=[[] for _ in range(support + query)],
            dense=[[] for _ in range(support + query)],
            label=[float(rng.random() < 0.4) for _ in range(support + query)],
            num_support=support,
        )
        for support, query in sizes
    ]


def some_batch(seed: int = 0, num_tasks: int = 40) -> TaskBatch:
    rng = random.Random(seed)
    sizes = [(rng.randrange(6), rng.randrange(1, 4)) for _ in range(num_tasks)]
    return batch_of(some_tasks(sizes, seed), FEATURES)


def build(count: int = 5, residual_of: str = "item", features: Features = FEATURES) -> MetaLearner:
    support = SupportFeaturesConfig(task=True, residual_of=residual_of, label_prior=PRIOR)
    items = ItemFeaturesConfig(columns=("item",) if residual_of else ())
    neighbours = NeighboursConfig("item", count)
    return build_learner(
        features, ModelConfig("melu", 4, hidden=(8,)), AlgorithmConfig("none"), "bce", 1.0,
        build_statistics(support, features, items, neighbours), items, LabelsConfig(), neighbours,
    )  # fmt: skip


def filled(
    batch: TaskBatch, count: int = 5, residual_of: str = "item", features: Features = FEATURES
) -> MetaLearner:
    learner = build(count, residual_of, features)
    assert learner.neighbours is not None
    if learner.items is not None:
        sums = learner.items.empty_sums()
        learner.items.add(sums, batch)
        learner.items.set_from_sums(sums)
    lists = learner.neighbours.make_lists()
    count_neighbours(learner.neighbours.make_baskets(batch), lists)
    learner.neighbours.set_lists(lists)
    return learner


def weights_of(batch: TaskBatch, is_counted_T: list[bool]) -> Floats:
    """Both weights of all pairs [A, A, 2] over these tasks, as products of dense matrices."""
    z_TA, has_TA = np.zeros((2, batch.num_tasks, NUM_ITEMS))
    starts = batch.row_offsets_T1.tolist()
    for task in np.flatnonzero(is_counted_T).tolist():
        rows = range(starts[task], starts[task + 1])
        label = [(float(batch.label_N[row]) - PRIOR.mean) / PRIOR.deviation for row in rows]
        level = sum(label) / (len(label) + 3.0)
        for one, row in zip(label, rows, strict=True):
            item = int(batch.unique_ids_U[batch.positions_NF[row, 1]])
            if item:  # the newest row of an item stays
                z_TA[task, item], has_TA[task, item] = one - level, 1.0
    count_A = has_TA.sum(axis=0)
    r_TA = has_TA * (z_TA - z_TA.sum(axis=0) / (count_A + 5.0))
    together, alike = has_TA.T @ has_TA, r_TA.T @ r_TA
    together /= np.sqrt(np.outer(count_A, count_A)) + 5.0
    alike /= np.sqrt(np.outer(np.diag(alike), np.diag(alike))) + 3.0
    weights = np.stack([together, alike], axis=2)
    weights[np.arange(NUM_ITEMS), np.arange(NUM_ITEMS)] = 0.0
    return weights


@given(
    count=st.sampled_from([1, 4, 30]), pairs_at_once=st.sampled_from([3, 40, 10**6]),
    num_parts=st.sampled_from([1, 2, 4]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_lists_are_those_of_a_dense_calculation(
    count: int, pairs_at_once: int, num_parts: int, seed: int
) -> None:
    batch = some_batch(seed)
    neighbours = build(count).neighbours
    assert neighbours is not None
    halves = (
        neighbours.make_baskets(batch.tasks(0, 17)),
        neighbours.make_baskets(batch.tasks(17, 40)),
    )
    lists = neighbours.make_lists()
    for part in range(num_parts):
        count_neighbours(Baskets.join(halves), lists, part, num_parts, pairs_at_once)
    fold_T = find_folds(batch.task_T.numpy())
    for level in range(NUM_FOLDS + 1):
        wanted = weights_of(batch, [fold != level for fold in fold_T])
        found = np.zeros_like(wanted)
        for item in range(NUM_ITEMS):
            kept = np.flatnonzero(lists.ids[level, item])
            assert kept.tolist() == list(range(len(kept)))  # the first of the list
            found[item, lists.ids[level, item, kept]] = lists.weights[level, item, kept]
            score = np.abs(found[item]).sum(axis=1)
            assert (np.diff(score[lists.ids[level, item, kept]]) < 1e-3).all()
            # None that is left out is nearer than one that is kept.
            left_out = np.abs(wanted[item]).sum(axis=1)[score == 0]
            farthest = score[score > 0].min(initial=math.inf) if len(kept) == count else 0.0
            assert left_out.max() <= farthest + 1e-3
            np.testing.assert_allclose(found[item][score > 0], wanted[item][score > 0], atol=1e-3)


def test_sums_are_the_same_to_the_bit_wherever_they_are_cut() -> None:
    batch = some_batch(num_tasks=400)
    neighbours = build().neighbours
    assert neighbours is not None
    baskets = neighbours.make_baskets(batch)
    fold_N = np.repeat(baskets.fold_T.astype(np.int64), np.diff(baskets.offsets_T1))
    order_N, shape = np.argsort(baskets.item_N, kind="stable"), (NUM_FOLDS, NUM_ITEMS)

    def sums_of(pairs_at_once: int) -> Floats:
        parts = _count_pairs(baskets, fold_N, order_N, shape, pairs_at_once)
        return np.concatenate([sums for _, _, sums in parts], axis=2)

    whole = sums_of(10**6)
    assert all(np.array_equal(sums_of(number), whole) for number in (3, 50, 1000))


@pytest.mark.parametrize("residual_of", ["item", ""])
@pytest.mark.parametrize("to_train", [True, False])
@pytest.mark.parametrize("in_groups", [True, False])
def test_features_are_those_of_a_loop(to_train: bool, residual_of: str, in_groups: bool) -> None:
    batch = some_batch(seed=3)
    learner = filled(batch, 4, residual_of, replace(FEATURES, draws_negatives=in_groups))
    assert learner.neighbours is not None
    lists = learner.neighbours.fold_lists() if to_train else learner.neighbours.lists()
    before = learner.items.fold_statistics() if to_train and learner.items else learner
    known = batch
    if learner.items is not None:
        known = learner.items.with_features(batch) if not to_train else before.with_features(batch)  # type: ignore[operator]
    found_NK = learner.statistics.features_NK(known, lists)[:, -6:]
    fold_T, starts = find_folds(batch.task_T.numpy()), batch.row_offsets_T1.tolist()
    item_N = batch.unique_ids_U[batch.positions_NF[:, 1].long()].tolist()
    label_N = [(label - PRIOR.mean) / PRIOR.deviation for label in batch.label_N.tolist()]
    expected_N = known.dense_NK[:, 0].tolist() if residual_of else [0.0] * batch.num_rows
    for task in range(batch.num_tasks):
        support = range(starts[task], starts[task] + int(batch.support_lengths_T[task]))
        level = fold_T[task] if to_train else 0
        of_task = batch.label_N[starts[task] : starts[task + 1]].tolist(), len(support)
        for row in range(starts[task], starts[task + 1]):
            near = dict(
                zip(
                    lists.ids[level, item_N[row]].tolist(),
                    lists.weights[level, item_N[row]],
                    strict=True,
                )
            )
            near.pop(0, None)
            left_out = rows_left_out(*of_task, row - starts[task], in_groups)
            others = [other for other in support if other - starts[task] not in left_out]
            mean = sum(label_N[one] - expected_N[one] for one in others) / (len(others) + 3.0)
            sums = np.zeros(6)
            for other in others:
                together, alike = map(float, near.get(item_N[other], (0.0, 0.0)))
                above = label_N[other] - expected_N[other] - mean
                is_positive = label_N[other] > 0
                sums += [alike * above, abs(alike), together, together * above,
                         together * is_positive, together * (not is_positive)]  # fmt: skip
            sums[0] /= sums[1] + 0.5
            sums[2:] /= math.sqrt(max(len(others), 1))
            wanted = np.arcsinh(sums * [3, 3, 10, 10, 10, 10])
            np.testing.assert_allclose(found_NK[row], wanted, rtol=1e-5, atol=1e-6)


def test_a_folds_lists_are_the_same_to_the_bit_without_its_tasks() -> None:
    """Neither a label nor that a task is there: what its rows see is of other folds."""
    batch = some_batch(num_tasks=60)
    fold_T = find_folds(batch.task_T.numpy())
    neighbours = build().neighbours
    assert neighbours is not None

    def lists_of(some: TaskBatch) -> NeighbourLists:
        assert neighbours is not None
        lists = neighbours.make_lists()
        count_neighbours(neighbours.make_baskets(some), lists)
        return lists

    whole = lists_of(batch)
    task_N = torch.repeat_interleave(torch.arange(60), batch.row_offsets_T1.diff())
    for fold in range(NUM_FOLDS):
        mine_N = torch.from_numpy(fold_T == fold)[task_N]
        other_labels = replace(batch, label_N=torch.where(mine_N, 1 - batch.label_N, batch.label_N))
        # Without them: as unknown items.
        ids = batch.unique_ids_U.clone()
        no_item = replace(
            batch,
            unique_ids_U=torch.cat([ids, torch.zeros(1, dtype=ids.dtype)]),
            positions_NF=torch.where(
                mine_N[:, None], torch.tensor(len(ids), dtype=torch.int32), batch.positions_NF
            ),
        )
        for changed in (lists_of(other_labels), lists_of(no_item)):
            for before, after in ((whole.ids, changed.ids), (whole.weights, changed.weights)):
                assert np.array_equal(before[fold], after[fold])
                assert not np.array_equal(before[-1], after[-1])


def auc(score_N: torch.Tensor, label_N: torch.Tensor) -> float:
    positive, negative = score_N[label_N == 1], score_N[label_N == 0]
    above = (positive[:, None] > negative).float() + 0.5 * (positive[:, None] == negative).float()
    return float(above.mean())


def test_labels_that_are_shuffled_inside_tasks_teach_nothing() -> None:
    """A model that knows the ids learns noise by heart, and no better with neighbours of other
    folds than with those of other tasks; with those that count its own tasks it does."""
    rng = random.Random(5)

    def shuffled_tasks(number: int) -> TaskBatch:
        tasks = some_tasks([(6, 4)] * number, rng.randrange(10**6), MANY_ITEMS)
        for task in tasks:
            # Not as many of each in every task: then the others of a row would tell of it.
            task.label[:] = [float(rng.random() < 0.5) for _ in task.label]
        return batch_of(tasks, WIDE)

    train, others, valid = (shuffled_tasks(number) for number in (300, 300, 300))

    def fit(counted: str) -> tuple[float, float]:
        """AUC on training rows, and on query rows of other tasks."""
        torch.manual_seed(1)
        learner = filled(train, MANY_ITEMS - 1, features=WIDE)
        assert learner.neighbours is not None
        lists = learner.neighbours.fold_lists()
        if counted == "in other tasks":
            count_neighbours(learner.neighbours.make_baskets(others), lists)
        if counted == "in its own task, too":
            lists.ids[:], lists.weights[:] = lists.ids[-1:], lists.weights[-1:]
        tables = torch.nn.Parameter(torch.randn(3 + MANY_ITEMS, 4) * 0.1)
        optimizer = torch.optim.Adam([*learner.parameters(), tables], 0.02)
        found = []
        batch, unseen = learner.collate(train), learner.collate_to_predict(valid)

        def fetch(known: Episodes) -> torch.Tensor:
            first_U = torch.tensor([0, 3]).repeat_interleave(known.unique_lengths_B)
            return tables[first_U + known.unique_ids_U]

        for _ in range(150):
            optimizer.zero_grad()
            learner(fetch(batch), batch, 1.0 / batch.num_terms).backward()
            optimizer.step()
        sides = (batch, batch.rows), (unseen, unseen.rows.query)  # type: ignore[union-attr]
        for known, rows in sides:
            assert isinstance(rows, Side)
            with torch.no_grad():
                working = WorkingRows(known.working_rows_PD(fetch(known)), 0.0)
                loop = learner.general_loop
                output_N = loop.output_N(loop.unadapted(working, rows), rows)
            found.append(auc(output_N, rows.label_N))
        return found[0], found[1]

    elsewhere, own = fit("in other tasks"), fit("in other folds")
    # Five seeds: 0.761 and 0.752, 0.756 and 0.761, 0.766 and 0.761, 0.745 and 0.762, 0.767 and
    # 0.748 on training rows; 0.92 where tasks count themselves.
    assert abs(own[0] - elsewhere[0]) < 0.03
    assert abs(own[1] - 0.5) < 0.05
    assert fit("in its own task, too")[0] > elsewhere[0] + 0.1


def test_a_task_has_pairs_of_its_newest_items_alone() -> None:
    num_items = MOST_ITEMS + 50
    items: Int64 = np.concatenate([np.arange(1, num_items), [3, 0]])
    folds = np.zeros(1, np.int64)
    baskets = Baskets.of(np.array([len(items)]), items, np.arange(len(items)) / 100, folds)
    # Item 3 was met again; row 0 is no item.
    assert baskets.item_N.tolist() == [*range(num_items - MOST_ITEMS + 1, num_items), 3]
    assert baskets.offsets_T1.tolist() == [0, MOST_ITEMS]


def test_lists_are_mapped_in_another_process_and_kept_in_a_checkpoint() -> None:
    batch = some_batch()
    learner = filled(batch)
    assert learner.neighbours is not None
    lists = learner.neighbours.fold_lists()
    other = pickle.loads(pickle.dumps(lists))
    assert np.array_equal(other.ids, lists.ids)
    assert np.array_equal(other.weights, lists.weights)
    with pytest.raises(ValueError, match="read-only"):
        other.ids[0] = 0
    fresh = build()
    assert fresh.neighbours is not None
    with pytest.raises(ValueError, match="not counted over training rows"):
        fresh.neighbours.fold_lists()
    fresh.load_state_dict(learner.state_dict())
    wanted = learner.collate_to_predict(batch).rows.query.dense_NK  # type: ignore[union-attr]
    assert torch.equal(fresh.collate_to_predict(batch).rows.query.dense_NK, wanted)  # type: ignore[union-attr]
    assert wanted[:, -6:].any()
    # A rank without tasks has no rows.
    nothing = learner.collate(empty_batch(2, 2, 0, 0)).rows.dense_NK  # type: ignore[union-attr]
    assert nothing.shape == (0, learner.statistics.width + 2)


def test_a_full_disk_is_told_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fill)
    told = catch_message(NotWrittenError, NeighbourLists.make_on_disk, 5, 10**6, 50)
    assert told == (
        f"neighbours need 2.4 GB in {tempfile.gettempdir()}: No space left on device. Set TMPDIR "
        "to a folder with room, or lower neighbours.count"
    )


def test_an_item_keeps_its_neighbours_until_it_comes_again() -> None:
    first, second = some_batch(1), some_batch(2, num_tasks=2)
    learner, alone = filled(first), filled(second)
    assert learner.neighbours is not None
    assert alone.neighbours is not None
    before = learner.neighbours.lists().ids[0].copy()
    lists = learner.neighbours.make_lists()
    count_neighbours(learner.neighbours.make_baskets(second), lists)
    learner.neighbours.set_lists(lists)
    after, own = learner.neighbours.lists().ids[0], alone.neighbours.lists().ids[0]
    comes_again = own.any(axis=1)
    assert 0 < comes_again.sum() < NUM_ITEMS - 1
    assert np.array_equal(after, np.where(comes_again[:, None], own, before))


def test_a_column_that_is_not_there_is_refused() -> None:
    config = NeighboursConfig("shop")
    with pytest.raises(ValueError) as caught:
        build_statistics(SupportFeaturesConfig(), FEATURES, ItemFeaturesConfig(), config)
    assert str(caught.value) == (
        "neighbours.column = 'shop' is no single-id column: this dataset has user, item. Name one "
        'of them, or none at all: ""'
    )
    large = replace(FEATURES, tables=(TableSpec("user", 3), TableSpec("item", 1 << 21)))
    with pytest.raises(ValueError) as caught:
        build(600, features=large)
    assert str(caught.value) == (
        "neighbours.count = 600 of 2,097,152 rows of table item: at most 1,073,741,824 in all are "
        "allowed. Lower it, or leave the column out"
    )
