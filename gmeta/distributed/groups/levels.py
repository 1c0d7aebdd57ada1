"""This rank in its group, and among the ranks of other groups that hold the same rows."""

from typing import NamedTuple

from gmeta.distributed.ranks import Ranks, join_subset
from gmeta.errors import ConfigError


class Levels(NamedTuple):
    """The ranks of this rank's group, over which tables are sharded, and those of its place in all
    groups, which hold copies of its rows; None: there is one group."""

    inside: Ranks
    across: Ranks | None = None

    @property
    def group(self) -> int:
        """Return the number of this rank's group."""
        return self.across.rank if self.across else 0

    @property
    def members(self) -> range:
        """Return the numbers of this group's ranks among all."""
        first = self.group * self.inside.world_size
        return range(first, first + self.inside.world_size)


def split_levels(ranks: Ranks, num_groups: int) -> Levels:
    """Return both levels; neighbours, which torchrun numbers host by host, form a group. Raises
    ConfigError: the ranks do not fill the groups evenly. Collective."""
    if num_groups == 1:
        return Levels(ranks)
    if ranks.world_size % num_groups:
        raise ConfigError(
            f"sharding.groups = {num_groups} with {ranks.world_size} ranks: each group needs the "
            "same number of them. Set it to a divisor of the number of ranks, or to 1"
        )
    everyone = list(range(ranks.world_size))
    size = ranks.world_size // num_groups
    inside = join_subset(ranks, [everyone[first : first + size] for first in everyone[::size]])
    return Levels(inside, join_subset(ranks, [everyone[first::size] for first in range(size)]))
