"""Which ranks hold the slices of long sequences, and how they share the attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from gmeta.config.sharding import SequenceKind
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.peers import Peers
from gmeta.errors import ConfigError


@dataclass(frozen=True)
class SequenceSharding:
    """Ranks that hold slices of the same sequences: rank r of `slices` has the r-th.

    Those of `heads` give each other all places of some of their heads (Ulysses); those of `ring`
    pass on blocks of keys, each of all places that a group of `heads` holds."""

    slices: Peers
    heads: Peers
    ring: Peers

    def first(self, places: int) -> int:
        """Return the place in the whole sequence of the first in this rank's slice of so many."""
        return self.slices.rank * places


def split_ranks(kind: SequenceKind, num_heads: int, world_size: int) -> tuple[int, int]:
    """Return how many ranks share heads, and how many such groups share places. Raises ConfigError:
    `ulysses` cannot give every rank as many heads."""
    if kind == "none":
        return 1, 1
    sharing = {"ulysses": world_size, "ring": 1}.get(kind, math.gcd(num_heads, world_size))
    if num_heads % sharing:
        raise ConfigError(
            f'sharding.sequence = "ulysses" gives each rank the same number of heads, and '
            f"{num_heads} heads cannot be shared by {world_size} ranks. Set the number of heads to "
            f'a multiple of {world_size}, or sharding.sequence = "both" or "ring"'
        )
    return sharing, world_size // sharing


def shard_sequences(kind: SequenceKind, num_heads: int, ranks: Ranks) -> SequenceSharding:
    """Return how the ranks hold sequences whose attention has so many heads. Collective."""
    sharing, groups = split_ranks(kind, num_heads, ranks.world_size)
    if sharing * groups == 1:
        return SequenceSharding(Peers(), Peers(), Peers())
    everyone = list(range(ranks.world_size))
    slices = Peers(_own_group([everyone], ranks))
    # Ranks that share heads hold neighbouring slices: together a slice again.
    heads = [everyone[first : first + sharing] for first in everyone[::sharing]]
    rings = [everyone[first::sharing] for first in range(sharing)]
    return SequenceSharding(
        slices,
        slices if groups == 1 else Peers(_own_group(heads, ranks)),
        slices if sharing == 1 else Peers(_own_group(rings, ranks)),
    )


def _own_group(members: Sequence[list[int]], ranks: Ranks) -> dist.ProcessGroup | None:
    """Return this rank's group; None if it would be alone in it."""
    if len(members[0]) == 1:
        return None
    # Every rank makes all groups, in the same order, by the job's own backend.
    groups: list[dist.ProcessGroup] = [dist.new_group(one) for one in members]
    return next(group for group, one in zip(groups, members, strict=True) if ranks.rank in one)
