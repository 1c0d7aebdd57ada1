"""Whole tasks in torch's DataLoader, against the rows written."""

from collections.abc import Iterable

from torch.utils.data import DataLoader

from metaio import FormatError, TaskDataset
from metaio.read.task_dataset import Tasks
from tests.metaio.conftest import FEATURES, Episode, WriteFn, episodes_of_rows, make_rows
from tests.support.refusals import catch_message


def episodes_of(batches: Iterable[Tasks]) -> list[Episode]:
    """Each task as `episodes_of_rows` tells it, from the named columns."""
    found: list[Episode] = []
    for batch in batches:
        ends, sizes = batch.lengths_T.cumsum(0), batch.lengths_T
        for task, end, length, support in zip(
            *(one.tolist() for one in (batch.task_T, ends, sizes, batch.support_lengths_T)),
            strict=True,
        ):
            first = end - length
            lines: list[object] = []
            for row in range(first, end):
                lists = [
                    values[starts[row] : starts[row + 1]].tolist()
                    for values, starts in batch.lists.values()
                ]
                dense = [float(batch.columns[name][row]) for name in FEATURES.dense]
                single = [int(batch.columns[one.name][row]) for one in FEATURES.single]
                lines.append((float(batch.label_N[row]), dense, single, lists))
            is_support = batch.is_support_N[first:end].tolist()
            assert is_support == [True] * support + [False] * (length - support)
            found.append((task, support, lines))
    return found


def load(dataset: TaskDataset, num_workers: int) -> list[Tasks]:
    """The batches of an epoch."""
    return list(DataLoader(dataset, batch_size=None, num_workers=num_workers))


def test_every_task_comes_once_over_ranks_and_workers(write: WriteFn) -> None:
    rows = make_rows(37)
    path = write({"train": rows}, block_rows=50)
    for world_size, num_workers in ((1, 0), (1, 2), (3, 0), (3, 2)):
        parts = [
            TaskDataset(path, tasks_per_step=12, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        batches = [load(part, num_workers) for part in parts]
        assert {len(part) for part in (*parts, *batches)} == {4}
        read = episodes_of(batch for part in batches for batch in part)
        assert sorted(read, key=lambda one: one[0]) == episodes_of_rows(rows)


def test_workers_leave_the_batches_as_they_are_in_every_epoch(write: WriteFn) -> None:
    path = write({"train": make_rows(20)}, block_rows=50)
    dataset = TaskDataset(path, tasks_per_step=3, seed=4)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        tasks = [batch.task_T.tolist() for batch in loader]
        assert tasks == [batch.task_T.tolist() for batch in dataset]
        orders.append(tasks)
    assert orders[0] != orders[1] != orders[2]
    assert dataset.num_ids == {"item": 500, "age": 8, "last_item": 500, "tags": 40, "history": 500}


def test_a_wrong_argument_is_told_at_once(write: WriteFn) -> None:
    path = write({"train": make_rows(3)})
    assert catch_message(FormatError, TaskDataset, path, "valid", tasks_per_step=1) == (
        f"{path} has no split valid; it has train. Choose one of them, or prepare it"
    )
    assert catch_message(ValueError, TaskDataset, path, tasks_per_step=1, rank=2).startswith(
        "rank is 2; with world_size 1 it must be 0"
    )
