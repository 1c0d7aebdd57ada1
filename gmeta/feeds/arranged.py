"""The way of a rank's batches from its feed to its steps."""

from collections.abc import Iterator

from gmeta.batches.accumulate import MicroBatches
from gmeta.batches.augment import augmented
from gmeta.batches.episodes import Episodes
from gmeta.batches.labels import kinds_of, labels_checked
from gmeta.config import TrainConfig
from gmeta.feeds.agent import Agent
from gmeta.feeds.feed import Feed
from gmeta.parallel.sharding import ShardedLearner
from gmeta.parallel.stopping import Stop
from gmeta.parallel.together import idle_if_wrong, no_tasks, stopping_if_wrong
from gmeta.runs.progress import Progress
from metaio.format.dataset import Dataset


def arranged_batches(
    config: TrainConfig,
    dataset: Dataset,
    feed: Feed,
    agent: Agent,
    local: ShardedLearner,
    progress: Progress,
    stop: Stop,
) -> Iterator[Episodes | MicroBatches]:
    """Yield this rank's batches from where `progress` stands in its epoch: checked, augmented and
    arranged. One that is wrong asks all ranks to stop before its step.
    """
    epoch, step, features = progress.epoch, progress.epoch_step, dataset.features
    arrange = local.learner.arranging().in_epoch(epoch)
    made = feed.episodes(local, epoch, step)
    if made is not None:
        return idle_if_wrong(made, arrange(no_tasks(features)), stop)
    split = config.data.train_split
    checked = labels_checked(feed.batches(epoch, step), kinds_of(config, dataset), dataset, split)
    batches = augmented(checked, config.augment, features, config.run.seed, epoch, step)
    return agent.arranged(stopping_if_wrong(batches, features, stop), arrange)
