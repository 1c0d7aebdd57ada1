"""Which features of a batch are arranged once a task: those that no task's rows differ in."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gmeta.adaptation.layout.common_features import _order_columns
from gmeta.adaptation.layout.padded_layout import PaddedTasks
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.data import collate as blocks
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.format.features import Features
from metaio.read.batch import TaskBatch
from tests.support import reference

FEATURES = reference.some_features(3, 1, 0)
SINGLE_ID = reference.some_features(3, 0, 0)
Values = Callable[[int, int], list[int]]  # task, row -> ids of its single-id features


@pytest.fixture(autouse=True)
def _one_multiply_add_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LEAST_COMMON_WORK", {"cpu": 1})


def batch_of(
    values: Values, sizes: list[tuple[int, int]], features: Features = FEATURES
) -> TaskBatch:
    rng = random.Random(0)
    tasks = []
    for task, size in enumerate(sizes):
        made = reference.random_task(features, *size, rng)
        tasks.append(replace(made, single=[values(task, row) for row in range(sum(size))]))
    return reference.batch_of(tasks, features)


def common_features(batch: TaskBatch, features: Features = FEATURES) -> tuple[int, ...] | None:
    algorithm = AlgorithmConfig(name="maml", adapt_embeddings=False)
    model = ModelConfig(name="melu", embedding_dim=4, hidden=(6, 5))
    rows = build_learner(features, model, algorithm, "bce").collate(batch).rows
    assert isinstance(rows, PaddedTasks)
    if rows.common is None:
        return None
    num_features = len(features.single) + len(features.multi)
    (both,) = rows.features
    assert both.num_features == num_features - len(rows.common.features)
    return rows.common.features


def test_a_feature_that_differs_between_tasks_alone_stands_apart() -> None:
    batch = batch_of(lambda task, row: [task % 3, row % 4, task % 5], [(2, 2), (0, 3), (4, 1)])
    assert common_features(batch) == (0, 2)


def test_one_row_of_one_task_that_differs_is_enough_to_keep_a_feature() -> None:
    sizes = [(2, 2), (3, 3)]
    batch = batch_of(lambda task, row: [int((task, row) == (1, 5)), row % 4, row % 5], sizes)
    assert common_features(batch) is None


def test_an_empty_task_is_no_boundary_to_stumble_over() -> None:
    batch = batch_of(lambda task, row: [task % 3, row % 4, row % 5], [(0, 0), (2, 2), (0, 0)])
    assert common_features(batch) == (0,)


def test_rows_keep_an_input_of_their_own() -> None:
    batch = batch_of(lambda task, row: [task % 3, 1, 2], [(1, 1), (2, 1)], SINGLE_ID)
    assert common_features(batch, SINGLE_ID) == (0, 1)


def test_of_little_work_nothing_stands_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(lambda task, row: [task % 3, row % 4, 0], [(2, 2), (2, 2)])
    # 8 rows, 6 outputs, half of 16 inputs.
    monkeypatch.setattr(blocks, "LEAST_COMMON_WORK", {"cpu": 8 * 6 * 8})
    assert common_features(batch) == (0, 2)
    monkeypatch.setattr(blocks, "LEAST_COMMON_WORK", {"cpu": 8 * 6 * 8 + 1})
    assert common_features(batch) is None


def test_what_a_graph_of_cuda_reads_is_never_dropped() -> None:
    def order_X(feature: int) -> torch.Tensor:
        return _order_columns((feature,), 0, 1, 300, torch.device("cpu"))[0]

    captured = order_X(0)
    assert len({id(order_X(feature)) for feature in range(300)}) == 300
    assert order_X(0) is captured
