"""Whole tasks with named columns, as a torch dataset for a training loop of one's own.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, U unique ids"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from metaio.format.block import find_features_of_values
from metaio.format.dataset import open_dataset
from metaio.format.features import Features
from metaio.ragged import offsets
from metaio.read.batch import TaskBatch
from metaio.read.reader import BatchReader


class Tasks(NamedTuple):
    """The rows of whole tasks, task by task, by the names of their columns."""

    task_T: Tensor  # int64
    lengths_T: Tensor  # int64, rows of each task
    support_lengths_T: Tensor  # int64, its support rows, which stand first
    is_support_N: Tensor  # bool
    label_N: Tensor  # float32; [N, labels] where there are several, NaN: not known
    # By column, [N]: int64 ids below `TaskDataset.num_ids`, and float32 numbers.
    columns: dict[str, Tensor]
    # By column: the int64 ids [V] of all rows' lists, and where each row's begin, [N + 1].
    lists: dict[str, tuple[Tensor, Tensor]]
    weight_N: Tensor  # float32; empty where the dataset stores no weights


class TaskDataset(IterableDataset[Tasks]):
    """Batches of whole tasks, each task once an epoch over all ranks and workers.

    DataLoader(TaskDataset("data/clicks", tasks_per_step=64), batch_size=None, num_workers=2)

    `tasks_per_step` counts the tasks of all ranks. Every rank gets as many batches, so one may be
    without tasks; the number of workers changes none."""

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        tasks_per_step: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._path = str(path)
        self._read = partial(
            BatchReader,
            split=split,
            tasks_per_step=tasks_per_step,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
        )
        # Shared, since workers may outlive an epoch (persistent_workers).
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        # Now, so that a wrong argument is reported here and not by a worker.
        dataset = open_dataset(self._path)
        with self._read(dataset) as reader:
            self._num_steps = reader.num_steps()
        self.features = dataset.features

    @property
    def num_ids(self) -> dict[str, int]:
        """Return the number of ids of each column of ids or of lists: the rows of its embedding."""
        rows = {table.name: table.num_rows for table in self.features.tables}
        return {feature.name: rows[feature.table] for feature in self.features.sparse}

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass over the data shuffle the tasks as of this epoch."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every rank."""
        return self._num_steps

    def __iter__(self) -> Iterator[Tasks]:
        """Yield the batches of the epoch; in a worker of a DataLoader, its share of them."""
        worker, epoch = get_worker_info(), int(self._epoch)
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        steps = ((epoch, step) for step in range(first, self._num_steps, every))
        # Opened in each worker: threads and open files do not survive a fork.
        with self._read(open_dataset(self._path)) as reader:
            for batch in reader.batches_of_steps(steps):
                yield name_columns(self.features, batch)


def name_columns(features: Features, batch: TaskBatch) -> Tasks:
    """Return a batch's rows by the names of their columns."""
    lengths_T = batch.row_offsets_T1.diff()
    within_N = torch.arange(batch.num_rows) - batch.row_offsets_T1[:-1].repeat_interleave(lengths_T)
    ids_NF = batch.unique_ids_U[batch.positions_NF.long()]
    columns = {one.name: ids_NF[:, index] for index, one in enumerate(features.single)}
    columns |= {name: batch.dense_NK[:, index] for index, name in enumerate(features.dense)}
    lengths_NM = batch.multi_lengths_NM.numpy()
    ids_V = batch.unique_ids_U[batch.multi_positions_V.long()]
    feature_V = torch.from_numpy(find_features_of_values(lengths_NM))
    lists = {
        one.name: (ids_V[feature_V == index], torch.from_numpy(offsets(lengths_NM[:, index])))
        for index, one in enumerate(features.multi)
    }
    is_support_N = within_N < batch.support_lengths_T.repeat_interleave(lengths_T)
    return Tasks(
        batch.task_T,
        lengths_T,
        batch.support_lengths_T,
        is_support_N,
        batch.label_N,
        columns,
        lists,
        batch.weight_N,
    )
