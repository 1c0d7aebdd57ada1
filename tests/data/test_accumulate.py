"""Cutting a step's tasks into parts: every task once, the parts about as large as each other."""

import random

import pytest
import torch

from gmeta.data.collate import split_tasks
from metaio.read.batch import TaskBatch
from tests.support import reference

FEATURES = reference.some_features(2, 1, 1)


def batch_of_sizes(sizes: list[tuple[int, int]]) -> TaskBatch:
    rng = random.Random(4)
    return reference.batch_of(
        [reference.random_task(FEATURES, support, query, rng) for support, query in sizes], FEATURES
    )


@pytest.mark.parametrize(
    ("sizes", "num_parts", "tasks_of_parts"),
    [
        ([(2, 2)] * 6, 3, [2, 2, 2]),
        ([(9, 3), (1, 1), (1, 1), (1, 1), (1, 1), (2, 2)], 2, [1, 5]),  # by rows, not by tasks
        ([(2, 2)] * 2, 4, [1, 1]),  # a task is never cut
        ([(40, 10), (1, 1)], 4, [1, 1]),
        ([(2, 2)] * 2, 10**15, [1, 1]),  # memory for so many cuts there is none
        ([], 3, [0]),
    ],
)
def test_parts_hold_whole_tasks_and_about_as_many_rows(
    sizes: list[tuple[int, int]], num_parts: int, tasks_of_parts: list[int]
) -> None:
    batch = batch_of_sizes(sizes)
    parts = split_tasks(batch, num_parts)
    assert [part.num_tasks for part in parts] == tasks_of_parts
    for name in ("task_T", "support_lengths_T", "label_N", "dense_NK", "positions_NF"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(batch, name)), name
    for name in ("multi_positions_V", "multi_lengths_NM"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(batch, name)), name
    for part in parts:
        assert part.unique_ids_U is batch.unique_ids_U
        assert part.multi_positions_V.numel() == part.multi_lengths_NM.sum()
        assert part.row_offsets_T1[0] == 0
        assert part.row_offsets_T1[-1] == part.num_rows
