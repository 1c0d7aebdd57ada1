"""What the rows of the training split say of each value, before a run takes its first step."""

import numpy as np

from gmeta.batches.item_statistics import ItemStatistics
from gmeta.batches.labels import labels_checked
from gmeta.feeds.asked import BatchSettings
from gmeta.parallel.ranks import Ranks, add_arrays_over_ranks
from gmeta.parallel.together import by_all
from metaio.format.dataset import Dataset
from metaio.read.compose import compose


def take_item_statistics(
    items: ItemStatistics | None, settings: BatchSettings, dataset: Dataset, ranks: Ranks
) -> list[str]:
    """Read the training split once, each rank its share of the blocks, fill `items` with what it
    says, and return what to tell of it: nothing where there are none. Collective.

    Raises:
        ConfigError: a label is not one that the loss takes.
        FormatError: a file is missing or damaged.
    """
    if items is None:
        return []
    sums, split = items.no_sums(), dataset.split(settings.split)

    def read() -> None:
        for block in range(ranks.rank, split.num_blocks, ranks.world_size):
            stored = dataset.read_block(split.name, block)
            batch = compose(dataset.features, [(stored, np.arange(stored.num_episodes))])
            for checked in labels_checked([batch], settings.kinds, dataset, split.name):
                items.add(sums, checked)

    by_all(read, ranks)
    add_arrays_over_ranks([sums.total_K3, *sums.columns], ranks)
    items.take(sums)
    return [f"item_features: from {split.num_rows:,} rows of split {split.name}"]
