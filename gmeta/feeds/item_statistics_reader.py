"""Statistics of the training split's rows, before a run takes its first step."""

import numpy as np

from gmeta.data.features.item_statistics import ItemStatistics
from gmeta.data.features.neighbours import Neighbours
from gmeta.data.label_checks import check_labels
from gmeta.data.neighbour_counts import Baskets, NeighbourLists, count_neighbours
from gmeta.distributed.collective_errors import run_on_all
from gmeta.distributed.ranks import Ranks, add_arrays_over_ranks, broadcast_value, gather_values
from gmeta.feeds.batch_request import BatchSettings
from metaio.format.dataset import Dataset
from metaio.read.compose import compose


def read_item_statistics(
    items: ItemStatistics | None,
    neighbours: Neighbours | None,
    settings: BatchSettings,
    dataset: Dataset,
    ranks: Ranks,
) -> list[str]:
    """Read the training split once, each rank its share of the blocks, into `items` and
    `neighbours`; return the lines to print. Collective. Raises ConfigError: a loss does not take a
    label."""
    if items is None and neighbours is None:
        return []
    sums = items.empty_sums() if items is not None else None
    split, baskets = dataset.split(settings.split), dict[int, Baskets]()

    def add_split() -> None:
        for block in range(ranks.rank, split.num_blocks, ranks.world_size):
            stored = dataset.read_block(split.name, block)
            batch = compose(dataset.features, [(stored, np.arange(stored.num_episodes))])
            for checked in check_labels([batch], settings.kinds, dataset, split.name):
                if items is not None and sums is not None:
                    items.add(sums, checked)
                if neighbours is not None:
                    baskets[block] = neighbours.make_baskets(checked)

    # A rank that failed alone would leave the others in the sum.
    run_on_all(add_split, ranks)
    lines = []
    if items is not None and sums is not None:
        add_arrays_over_ranks([sums.total_by_fold, *sums.columns], ranks)
        items.set_from_sums(sums)
        lines.append(f"item_features: from {split.num_rows:,} rows of split {split.name}")
    if neighbours is not None:
        num_items = _read_neighbours(neighbours, baskets, ranks)
        lines.append(f"neighbours: of {num_items:,} values in split {split.name}")
    return lines


def _read_neighbours(neighbours: Neighbours, own: dict[int, Baskets], ranks: Ranks) -> int:
    """Count the neighbours over the blocks of all ranks; return how many values have any."""
    gathered = broadcast_value(gather_values(own, ranks), ranks) or []
    by_block = {block: part for each in gathered for block, part in each.items()}
    # In the order of blocks, whoever read them.
    baskets = Baskets.join([by_block[block] for block in sorted(by_block)])
    made: list[NeighbourLists] = []
    # A disk may be full on one rank alone.
    run_on_all(lambda: made.append(neighbours.make_lists()), ranks)
    lists = made[0]
    count_neighbours(baskets, lists, ranks.rank, ranks.world_size)
    # Each rank has filled some items' lists, and the others are 0.
    add_arrays_over_ranks([lists.ids, lists.weights], ranks)
    neighbours.set_lists(lists)
    return int(np.count_nonzero(lists.ids[-1, :, 0]))
