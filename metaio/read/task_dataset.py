"""A split as torch's IterableDataset of whole tasks, for training loops of one's own.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, U
unique ids, K dense columns"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from metaio.format.dataset import open_dataset
from metaio.format.features import Features
from metaio.read.batch import TaskBatch
from metaio.read.reader import BatchReader


@dataclass(frozen=True)
class Tasks:
    """Whole tasks by the names of their columns; a task's support rows stand before its others."""

    task_T: Tensor  # int64
    lengths_T: Tensor  # int64, rows of each task
    is_support_N: Tensor  # bool
    label_N: Tensor  # float32; [N, labels] where there are several
    columns: dict[str, Tensor]  # [N]: ids int64, dense columns float32
    lists: dict[str, tuple[Tensor, Tensor]]  # ids [V] and where each row's begin, then V: [N + 1]


class TaskDataset(IterableDataset[Tasks]):
    """Batches of whole tasks of a split, each task once an epoch over all ranks and workers.

    For a DataLoader with `batch_size=None` and any number of workers. `set_epoch` before an epoch
    shuffles anew; workers that stay from epoch to epoch (`persistent_workers`) do not see it."""

    def __init__(
        self, path: str, split: str = "train", *, tasks_per_batch: int = 64, rank: int = 0,
        world_size: int = 1, shuffle: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.features: Features = open_dataset(path).features
        self._path, self._split = path, split
        self._tasks_per_batch, self._shuffle, self._seed = tasks_per_batch, shuffle, seed
        self._rank, self._world_size = rank, world_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Tasks]:
        worker = get_worker_info()
        workers, own = (worker.num_workers, worker.id) if worker else (1, 0)
        sides = self._world_size * workers
        with BatchReader(
            open_dataset(self._path),
            self._split,
            tasks_per_step=self._tasks_per_batch * sides,
            rank=self._rank * workers + own,
            world_size=sides,
            seed=self._seed,
            shuffle=self._shuffle,
        ) as reader:
            for batch in reader.batches(self._epoch):
                if batch.num_tasks:
                    yield _name_columns(batch, self.features)


def _name_columns(batch: TaskBatch, features: Features) -> Tasks:
    lengths_T = batch.row_offsets_T1.diff()
    first_N = batch.row_offsets_T1[:-1].repeat_interleave(lengths_T)
    place_N = torch.arange(batch.num_rows) - first_N
    ids_NF = batch.unique_ids_U[batch.positions_NF.long()]
    dense = zip(features.dense, batch.dense_NK.unbind(1), strict=True)
    single = zip((one.name for one in features.single), ids_NF.unbind(1), strict=True)
    # Lists lie row by row, and within a row feature by feature: each value's feature is found.
    num_multi = len(features.multi)
    feature_V = torch.arange(num_multi).repeat(batch.num_rows)
    feature_V = feature_V.repeat_interleave(batch.multi_lengths_NM.flatten().long())
    ids_V = batch.unique_ids_U[batch.multi_positions_V.long()]
    zero = torch.zeros(1, dtype=torch.int64)
    return Tasks(
        task_T=batch.task_T,
        lengths_T=lengths_T,
        is_support_N=place_N < batch.support_lengths_T.repeat_interleave(lengths_T),
        label_N=batch.label_N,
        columns=dict([*single, *dense]),
        lists={
            one.name: (
                ids_V[feature_V == at],
                torch.cat([zero, batch.multi_lengths_NM[:, at].long().cumsum(0)]),
            )
            for at, one in enumerate(features.multi)
        },
    )
