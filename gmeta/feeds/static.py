"""A rank's fixed share of every step."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, final

from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes
from gmeta.data.reader import open_reader
from gmeta.distributed.ranks import Ranks
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.batch_source import BatchSource
from gmeta.feeds.batch_workers import start_workers
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch

if TYPE_CHECKING:
    from gmeta.distributed.sharded_learner import ShardedLearner


@final
class StaticBatchSource(BatchSource):
    """A rank's share of every step, computed from the seed alone."""

    def __init__(
        self, settings: BatchSettings, dataset: Dataset, ranks: Ranks, *, is_fresh: bool
    ) -> None:
        data, run = settings.data, settings.run
        self._reader = open_reader(
            data, run.seed, dataset, data.train_split, ranks.rank, ranks.world_size
        )
        self._num_epochs = run.epochs
        self.num_steps = self._reader.num_steps()
        # Both while the model and the run folder are prepared.
        self.workers = start_workers(settings, dataset, ranks)
        # A resumed run begins somewhere in its epoch: its first blocks are others.
        if is_fresh and self.workers is None:
            self._reader.prefetch(epoch=0)

    def batches(self, epoch: int, first_step: int) -> Iterator[TaskBatch]:
        """Read this rank's share of each step, in the seed's order."""
        yield from self._reader.batches(epoch, first_step=first_step)
        if epoch + 1 < self._num_epochs:
            self._reader.prefetch(epoch + 1)  # while this epoch is validated and saved

    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int
    ) -> Iterator[Episodes | MicroBatches] | None:
        """Return the processes' batches, if there are any."""
        if self.workers is None:
            return None
        return self.workers.episodes(local, epoch, first_step, self.num_steps)

    def report_trained(self, num_tasks: int) -> None:
        """Do nothing: the step's number says it all."""

    def is_epoch_over(self, epoch_step: int) -> bool:
        """Return whether the epoch's last step was taken."""
        return epoch_step >= self.num_steps

    def checkpoint_files(self, step: int, *, in_memory: bool = False) -> Mapping[str, str]:
        """Return nothing: progress.json says it all."""
        return {}

    def confirm_checkpoint(self) -> None:
        """Do nothing: no service waits for it."""

    @property
    def wait_s(self) -> float:
        """Return the seconds that steps waited for the reader."""
        return self._reader.wait_s if self.workers is None else self.workers.wait_s

    def close(self) -> None:
        """End the reader's threads."""
        self._reader.close()
