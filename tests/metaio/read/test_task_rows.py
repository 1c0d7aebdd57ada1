"""Level-2 rows against a dict of (episode, position) pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from metaio import BatchReader, TaskBatch, open_dataset
from metaio.read.batch import deduplicate_task_rows
from tests.metaio.conftest import WriteFn, make_rows


def slow_pairs(batch: TaskBatch) -> dict[tuple[int, int], None]:
    found: dict[tuple[int, int], None] = {}
    value = 0
    for episode in range(batch.num_tasks):
        first, stop = int(batch.row_offsets_T1[episode]), int(batch.row_offsets_T1[episode + 1])
        for row in range(first, stop):
            count = int(batch.multi_lengths_NM[row].sum())
            own = [*batch.positions_NF[row], *batch.multi_positions_V[value : value + count]]
            found |= {(episode, int(position)): None for position in own}
            value += count
    return dict.fromkeys(sorted(found))


@pytest.mark.parametrize("unused", [0, 2])
@pytest.mark.parametrize("tasks_per_step", [9, 1])
def test_pairs_are_the_distinct_episode_and_position_pairs(
    write: WriteFn, tasks_per_step: int, unused: int
) -> None:
    dataset = open_dataset(write({"train": make_rows(40)}, block_rows=50))
    with BatchReader(dataset, "train", tasks_per_step=tasks_per_step) as reader:
        for read in reader.batches(0):
            more = torch.cat([read.unique_ids_U, torch.zeros(unused, dtype=torch.int64)])
            batch = replace(read, unique_ids_U=more)
            assert batch.uses_all_ids == (unused == 0)
            rows = deduplicate_task_rows(batch)
            pairs = list(slow_pairs(batch))
            assert rows.level1_position_P.tolist() == [position for _, position in pairs]
            level1 = rows.level1_position_P
            assert (level1[rows.positions_NF] == batch.positions_NF).all()
            assert (level1[rows.multi_positions_V] == batch.multi_positions_V).all()
            episodes = np.repeat(np.arange(batch.num_tasks), np.diff(batch.row_offsets_T1))
            owner = np.array([episode for episode, _ in pairs])
            assert (owner[rows.positions_NF] == episodes[:, None]).all()
