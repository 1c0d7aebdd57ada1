"""The source of a rank's batches: a fixed share of every step, or leased shards."""

import abc
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes
from gmeta.runs.logging.logger import Logger
from metaio.read.batch import TaskBatch

if TYPE_CHECKING:
    from gmeta.distributed.sharded_learner import ShardedLearner
    from gmeta.feeds.batch_workers import BatchWorkers


class BatchSource(abc.ABC):
    """A rank's batches, epoch by epoch. Every rank makes one and calls it in the same places."""

    # Sources differ in when an epoch is over, and in what a checkpoint must hold so that no episode
    # is trained twice or never.
    num_steps: int  # of an epoch; with leased shards the last ones may be smaller and a few more
    loggers: Mapping[str, Logger] = MappingProxyType({})  # by name; rank 0's are used
    workers: "BatchWorkers | None" = None  # that make the batches, where threads do not

    @abc.abstractmethod
    def batches(self, epoch: int, first_step: int) -> Iterator[TaskBatch]:
        """Yield this rank's batch of each step of `epoch` from `first_step` on; it may be empty."""

    @abc.abstractmethod
    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int
    ) -> Iterator[Episodes | MicroBatches] | None:
        """Return the batches as processes collate them; None: there are no processes."""

    @abc.abstractmethod
    def report_trained(self, num_tasks: int) -> None:
        """Record, after the optimizer's step, that it took `num_tasks` tasks of this rank."""

    @abc.abstractmethod
    def is_epoch_over(self, epoch_step: int) -> bool:
        """Return whether every episode of the epoch is in the model, on any rank."""

    @abc.abstractmethod
    def checkpoint_files(self, step: int, *, in_memory: bool = False) -> Mapping[str, str]:
        """Return the files beside the model of this step, texts by name, on rank 0. Collective."""

    @abc.abstractmethod
    def confirm_checkpoint(self) -> None:
        """Record that the checkpoint with the last `checkpoint_files` has its final name."""

    @property
    @abc.abstractmethod
    def wait_s(self) -> float:
        """Return the seconds that training has waited for data."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what runs in the background. Every rank calls it."""

    def __enter__(self) -> "BatchSource":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the process ends: what is left is the next one's, so wait for no one.
        if kind is None:
            self.close()
        if self.workers is not None:
            self.workers.close()
