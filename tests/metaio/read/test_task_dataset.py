"""torch's view of a split: every task once, with the rows that were written."""

import pytest
from torch.utils.data import DataLoader

from metaio import open_dataset
from metaio.read.task_dataset import TaskDataset, Tasks
from tests.metaio.conftest import Episode, WriteFn, make_rows, whole_split


def episodes_of(tasks: Tasks) -> list[Episode]:
    """The tasks as plain lists, row by row."""
    found: list[Episode] = []
    row = 0
    for task, length in zip(tasks.task_T.tolist(), tasks.lengths_T.tolist(), strict=True):
        rows = range(row, row + length)
        lines: list[object] = []
        for at in rows:
            dense = [tasks.columns[name][at].item() for name in ("price", "hour")]
            single = [tasks.columns[name][at].item() for name in ("item", "age", "last_item")]
            lists = []
            for name in ("tags", "history"):
                ids, begins = tasks.lists[name]
                lists.append(ids[begins[at] : begins[at + 1]].tolist())
            lines.append((tasks.label_N[at].item(), dense, single, lists))
        found.append((task, sum(tasks.is_support_N[at].item() for at in rows), lines))
        row += length
    return found


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (2, 3)])
def test_each_task_comes_once_over_ranks_and_workers(
    write: WriteFn, world_size: int, workers: int
) -> None:
    path = write({"train": make_rows(50)})
    epochs = []
    for epoch in (0, 1):
        found: list[Episode] = []
        for rank in range(world_size):
            dataset = TaskDataset(path, tasks_per_batch=4, rank=rank, world_size=world_size)
            dataset.set_epoch(epoch)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            for tasks in loader:
                assert 0 < tasks.task_T.numel() <= 4
                found += episodes_of(tasks)
        assert sorted(found) == sorted(whole_split(open_dataset(path), "train"))
        epochs.append([task for task, *_ in found])
    assert epochs[0] != epochs[1]
