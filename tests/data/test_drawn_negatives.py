"""Where each positive is followed by the negatives drawn for it, no share tells a label."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import AugmentConfig, LabelPrior, SupportFeaturesConfig
from gmeta.data.augment import augment_batch
from gmeta.data.episodes import Episodes
from gmeta.data.features.support_statistics import SupportStatistics
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.read.batch import TaskBatch
from tests.support.reference import Task, batch_of, random_task, some_features

DRAWN = 4
FEATURES = replace(some_features(1, 0, 1), draws_negatives=True)
# Of one positive in five labels: what the best constant loses.
CHANCE = -0.2 * np.log(0.2) - 0.8 * np.log(0.8)


def task_of_groups(support: int, query: int, rng: random.Random) -> Task:
    """A task whose rows say nothing of their labels; the dense input numbers its groups."""
    size = 1 + DRAWN
    task = random_task(FEATURES, support * size, query * size, rng)
    groups = [float(row // size) for row in range(len(task.label))]
    labels = [float(row % size == 0) for row in range(len(task.label))]
    return replace(task, label=labels, dense=[[group] for group in groups])


def some_batch(seed: int, num_tasks: int = 200) -> TaskBatch:
    rng = random.Random(seed)
    sizes = [(rng.randrange(5), rng.randrange(1, 3)) for _ in range(num_tasks)]
    return batch_of([task_of_groups(*each, rng) for each in sizes], FEATURES)


def resplit(batch: TaskBatch, epoch: int = 0) -> TaskBatch:
    return augment_batch(batch, AugmentConfig(resplit_support=True), FEATURES, 0, epoch, 0)


def test_a_resplit_draws_whole_groups() -> None:
    batch = some_batch(0)
    supported: Counter[float] = Counter()
    for epoch in range(3):
        changed = resplit(batch, epoch)
        assert torch.equal(changed.row_offsets_T1, batch.row_offsets_T1)
        for task, (start, end) in enumerate(pairwise(changed.row_offsets_T1.tolist())):
            label, groups = changed.label_N[start:end], changed.dense_NK[start:end, 0].tolist()
            assert label.tolist() == [1.0, *[0.0] * DRAWN] * (len(label) // (1 + DRAWN))
            firsts = groups[:: 1 + DRAWN]
            assert groups == [group for group in firsts for _ in range(1 + DRAWN)]
            assert sorted(firsts) == list(range(len(firsts)))
            in_support, rest = divmod(int(changed.support_lengths_T[task]), 1 + DRAWN)
            assert rest == 0
            if len(firsts) > 1:
                assert 0 < in_support < len(firsts)
                supported.update(firsts[:in_support])
    # Each place has its turn on each side.
    assert set(supported) == set(range(6))


@pytest.mark.parametrize(("in_groups", "is_redrawn"), [(True, False), (True, True), (False, False)])
def test_plain_training_learns_nothing_where_there_is_nothing(
    in_groups: bool, is_redrawn: bool
) -> None:
    config = SupportFeaturesConfig(task=True, columns=("*",))
    features = replace(FEATURES, draws_negatives=in_groups)
    statistics = SupportStatistics.of(config, features, LabelPrior(0.2, 0.4))
    torch.manual_seed(1)
    model = ModelConfig("melu", 2, hidden=(16,))
    learner = build_learner(
        features, model, AlgorithmConfig("none", plain_epochs=0), "bce", 1.0, statistics
    )
    train, valid = (replace(one, dense_NK=one.dense_NK * 0) for one in map(some_batch, (1, 2)))
    if is_redrawn:
        train = resplit(train)
    known, unseen = learner.collate(train), learner.collate_to_predict(valid)
    tables = torch.nn.Parameter(torch.randn(FEATURES.tables[0].num_rows, 2) * 0.1)
    optimizer = torch.optim.Adam([*learner.parameters(), tables], 0.02)

    def loss_of(episodes: Episodes) -> torch.Tensor:
        rows_UD = tables[episodes.unique_ids_U]
        return learner(rows_UD, episodes, 1.0 / episodes.num_terms)

    for _ in range(200):
        optimizer.zero_grad()
        loss_of(known).backward()
        optimizer.step()
    rows: Any = unseen.rows
    output_N = learner.predict(tables[unseen.unique_ids_U], unseen).before_N.detach()
    on_valid = torch.nn.functional.binary_cross_entropy_with_logits(output_N, rows.query.label_N)
    trained = float(loss_of(known).detach())
    if in_groups:
        assert abs(trained - CHANCE) < 0.01
        assert abs(float(on_valid) - CHANCE) < 0.01
    else:
        # A support row that leaves out itself alone sees what the others lack; a query row cannot.
        assert trained < CHANCE - 0.2
