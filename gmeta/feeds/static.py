"""A rank's fixed share of every step."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, final

from gmeta.batches.accumulate import MicroBatches
from gmeta.batches.episodes import Episodes
from gmeta.feeds.asked import BatchSettings
from gmeta.feeds.feed import Feed
from gmeta.feeds.processes import processes_of
from gmeta.feeds.reader import open_reader
from gmeta.parallel.ranks import Ranks
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch

if TYPE_CHECKING:
    from gmeta.parallel.sharded_learner import ShardedLearner


@final
class StaticFeed(Feed):
    """Every rank its share of every step, worked out from the seed alone."""

    def __init__(
        self, settings: BatchSettings, dataset: Dataset, ranks: Ranks, *, is_fresh: bool
    ) -> None:
        data, run = settings.data, settings.run
        self._reader = open_reader(
            data, run.seed, dataset, data.train_split, ranks.rank, ranks.world_size
        )
        self._num_epochs = run.epochs
        self.num_steps = self._reader.num_steps()
        # Both while the model and the run folder are made ready.
        self.processes = processes_of(settings, dataset, ranks)
        if is_fresh and self.processes is None:
            self._reader.prefetch(epoch=0)

    def batches(self, epoch: int, first_step: int) -> Iterator[TaskBatch]:
        """Read this rank's share of each step, in the order that the seed gives."""
        yield from self._reader.batches(epoch, first_step=first_step)
        if epoch + 1 < self._num_epochs:
            self._reader.prefetch(epoch + 1)  # while this epoch is validated and saved

    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int
    ) -> Iterator[Episodes | MicroBatches] | None:
        """Take them from the processes, if there are any."""
        if self.processes is None:
            return None
        return self.processes.episodes(local, epoch, first_step, self.num_steps)

    def trained(self, num_tasks: int) -> None:
        """Do nothing: the step's number says it all."""

    def epoch_over(self, epoch_step: int) -> bool:
        """Return whether the epoch's last step was taken."""
        return epoch_step >= self.num_steps

    def checkpoint_files(self, step: int) -> Mapping[str, str]:
        """Return nothing: progress.json says it all."""
        return {}

    def committed(self) -> None:
        """Do nothing: nobody waits for it."""

    @property
    def wait_s(self) -> float:
        """Return the seconds that steps waited for the reader."""
        return self._reader.wait_s if self.processes is None else self.processes.wait_s

    def close(self) -> None:
        """End the reader's threads."""
        self._reader.close()
