"""This rank in its group, and among the ranks of other groups that hold the same rows."""

from typing import NamedTuple

from gmeta.config.sharding import ShardingConfig, check_groups
from gmeta.distributed.ranks import Ranks, join_subset


class Levels(NamedTuple):
    """The ranks of this rank's group, over which tables are sharded, and those of its place in all
    groups, which hold copies of its rows; None: there is one group."""

    inside: Ranks
    across: Ranks | None = None
    sync_every: int = 1  # steps after which the copies are made one again
    overlaps_sync: bool = False
    outer_momentum: float = 0.0

    @property
    def is_local(self) -> bool:
        """Return whether groups take steps by themselves."""
        return self.across is not None and self.sync_every > 1

    @property
    def group(self) -> int:
        """Return the number of this rank's group."""
        return self.across.rank if self.across else 0

    @property
    def members(self) -> range:
        """Return the numbers of this group's ranks among all."""
        first = self.group * self.inside.world_size
        return range(first, first + self.inside.world_size)


def split_levels(ranks: Ranks, config: ShardingConfig) -> Levels:
    """Return both levels; neighbours, which torchrun numbers host by host, form a group. Raises
    ConfigError: the ranks do not fill the groups evenly. Collective."""
    num_groups = config.groups
    if num_groups == 1:
        return Levels(ranks)
    check_groups(config, ranks.world_size)
    everyone = list(range(ranks.world_size))
    size = ranks.world_size // num_groups
    inside = join_subset(ranks, [everyone[first : first + size] for first in everyone[::size]])
    across = join_subset(ranks, [everyone[first::size] for first in range(size)])
    return Levels(inside, across, config.sync_every, config.overlap_sync, config.outer_momentum)
