"""Two levels of network in a plan: the groups of ranks to compare, and the rows that they touch."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from gmeta.config.sharding import ShardingConfig, keeps_tables_beyond
from gmeta.config.train_config import DataConfig
from gmeta.data.reader import open_reader
from gmeta.distributed.cluster_spec import Cluster
from gmeta.distributed.groups.costs import TouchedCounts
from gmeta.distributed.sharding_estimate import ShardingEstimate, StepWork
from metaio.format.dataset import Dataset

FEWER_AVERAGES = 10  # steps between two, in the comparison
TASKS_AT_ONCE = 4096


def other_levels(
    sharding: ShardingConfig, found: ShardingEstimate, cluster: Cluster, usable: float
) -> Iterator[ShardingConfig]:
    """Yield one group, then two and as many as the tables fit in, of whole hosts, averaged in every
    step and more seldom; nothing for a single host, where there are no groups."""
    num_hosts = cluster.world_size // cluster.ranks_per_host
    if num_hosts == 1 or sharding.exchange != "host" or keeps_tables_beyond(sharding):
        return
    yield replace(sharding, groups=1, sync_every=1, outer_momentum=0.0)
    groups = most_groups(num_hosts, sharding.groups, found, cluster, usable)
    for number in sorted({2, groups}) if groups > 1 and num_hosts % 2 == 0 else ():
        for every in (1, FEWER_AVERAGES):
            yield replace(sharding, groups=number, sync_every=every)


def most_groups(
    limit: int, now: int, found: ShardingEstimate, cluster: Cluster, usable: float
) -> int:
    """Return the largest number of groups of whole hosts, at most `limit`, in which the tables fit,
    by an estimate for `now` groups; 0: there is none."""
    num_hosts = cluster.world_size // cluster.ranks_per_host
    # A group of fewer ranks has more of the tables on each.
    of_tables = (found.device_bytes_W.max() - found.fixed_bytes) / now
    return next(
        (
            groups
            for groups in range(min(limit, num_hosts), 0, -1)
            if num_hosts % groups == 0 and of_tables * groups + found.fixed_bytes <= usable
        ),
        0,
    )


def count_touched(
    data: DataConfig,
    seed: int,
    step: StepWork,
    sizes: Mapping[str, tuple[int, int]],
    dataset: Dataset | None,
    sharding: ShardingConfig,
    ranks_of_group: int,
) -> TouchedCounts:
    """Return the rows that groups touch between two averages: as counted in the dataset; without
    one as many as can be, where no two tasks share a row."""
    if dataset is not None:
        num_tasks = max(1, data.tasks_per_step // sharding.groups) * sharding.sync_every
        of_group = _count_distinct(data, seed, dataset, num_tasks)
        of_all = _count_distinct(data, seed, dataset, num_tasks * sharding.groups)
    else:
        ranks = ranks_of_group * sharding.sync_every
        of_group = {name: step.ids[name] * ranks for name in sizes}
        of_all = {name: step.ids[name] * ranks * sharding.groups for name in sizes}
    rows = {name: float(num_rows) for name, (num_rows, _) in sizes.items()}
    return TouchedCounts(
        {name: min(of_group[name], rows[name]) for name in sizes},
        {name: min(of_all[name], rows[name]) for name in sizes},
    )


def _count_distinct(
    data: DataConfig, seed: int, dataset: Dataset, num_tasks: int
) -> dict[str, float]:
    """Return the distinct ids of each table that so many tasks have; of more tasks than there are,
    as many more as if each brought ids of its own."""
    names = [table.name for table in dataset.features.tables]
    there = dataset.split(data.train_split).num_episodes
    wanted = min(num_tasks, there)
    # Part by part: no more than so many tasks are in memory at once.
    data = replace(data, tasks_per_step=min(wanted, TASKS_AT_ONCE), blocks_per_step=0)
    seen = [np.zeros(0, np.int64) for _ in names]
    with open_reader(data, seed, dataset, data.train_split, 0, 1) as reader:
        for batch in itertools.islice(reader.batches(0), -(-wanted // TASKS_AT_ONCE)):
            ends = np.cumsum(batch.unique_lengths_B.numpy())[:-1]
            ids_B = np.split(batch.unique_ids_U.numpy(), ends)
            seen = [np.union1d(before, ids) for before, ids in zip(seen, ids_B, strict=True)]
    return {name: ids.size * num_tasks / wanted for name, ids in zip(names, seen, strict=True)}
