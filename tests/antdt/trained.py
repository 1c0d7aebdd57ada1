"""Which units a manifest says are in the model, shard by shard: the audit uses arithmetic."""

from collections.abc import Iterator

from gmeta.antdt.manifests.shard_manifest import DatasetManifest
from gmeta.antdt.order import ShardOrder


def trained_ranges(entry: DatasetManifest) -> Iterator[tuple[int, int]]:
    """The [start, end) unit ranges of this epoch in the model, one for each shard touched."""
    spec = entry.spec
    order = ShardOrder(spec.num_shards, spec.seed, entry.epoch, spec.shuffle)
    for start, end in entry.done:
        for index in map(order.index_of, range(start, end)):
            first = spec.start_of(index)
            yield first, first + spec.length_of(index)
    for item in entry.exceptions:
        if item.units_done:
            first = spec.start_of(order.index_of(item.position))
            yield first, first + item.units_done
