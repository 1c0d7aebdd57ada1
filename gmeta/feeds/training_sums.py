"""What the rows of the training split say of each value, before a run takes its first step."""

import numpy as np

from gmeta.data.features.item_statistics import ItemStatistics
from gmeta.data.label_checks import check_labels
from gmeta.distributed.collective_errors import run_on_all
from gmeta.distributed.ranks import Ranks, add_arrays_over_ranks
from gmeta.feeds.batch_request import BatchSettings
from metaio.format.dataset import Dataset
from metaio.read.compose import compose


def read_item_statistics(
    items: ItemStatistics | None, settings: BatchSettings, dataset: Dataset, ranks: Ranks
) -> list[str]:
    """Read the training split once, each rank its share of the blocks, fill `items` with what it
    says, and return what to tell of it: nothing where there are none. Collective. Raises
    ConfigError: a label is not one that the loss takes."""
    if items is None:
        return []
    sums, split = items.empty_sums(), dataset.split(settings.split)

    def add_split() -> None:
        for block in range(ranks.rank, split.num_blocks, ranks.world_size):
            stored = dataset.read_block(split.name, block)
            batch = compose(dataset.features, [(stored, np.arange(stored.num_episodes))])
            for checked in check_labels([batch], settings.kinds, dataset, split.name):
                items.add(sums, checked)

    run_on_all(add_split, ranks)
    add_arrays_over_ranks([sums.total_by_fold, *sums.columns], ranks)
    items.set_from_sums(sums)
    return [f"item_features: from {split.num_rows:,} rows of split {split.name}"]
