"""How fast each rank's own network link is, which no collective tells: all wait for the slowest."""

import time
from collections.abc import Iterator
from typing import final

import torch
import torch.distributed as dist

from gmeta.distributed.ranks import Ranks

SWAP_BYTES = 65_536  # much more than a link's latency, much less than a step
REPEATS = 2


@final
class LinkProbe:
    """Swaps some bytes with both neighbours on a ring, one after the other.

    A pair is as slow as the slower link of the two. A healthy rank beside a slow one has its other
    pair fast; a rank both of whose pairs are slow is slow itself."""

    def __init__(self, ranks: Ranks) -> None:
        self._group = ranks.control
        self._peers = list(_order_neighbours(ranks.rank, ranks.world_size))
        self._token = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        self._load = (
            torch.zeros(SWAP_BYTES, dtype=torch.uint8),
            torch.zeros(SWAP_BYTES, dtype=torch.uint8),
        )

    def swap_s(self) -> float:
        """Return the seconds of a swap with the faster neighbour; 0 where there are only two ranks,
        of which nobody can say whose link it is. Collective: every rank calls it."""
        times_s = [self._time_swaps_s(peer) for peer in self._peers]
        return min(times_s, default=0.0)

    def _time_swaps_s(self, peer: int) -> float:
        self._swap(peer, self._token)  # both are here
        times_s = []
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            self._swap(peer, self._load)
            # A send is over once the kernel has the bytes: this one comes behind their arrival.
            self._swap(peer, self._token)
            times_s.append(time.perf_counter() - began_s)
        return min(times_s)

    def _swap(self, peer: int, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
        sent, received = buffers
        for work in (
            dist.isend(sent, peer, group=self._group),
            dist.irecv(received, peer, group=self._group),
        ):
            if work is not None:
                work.wait()


def _order_neighbours(rank: int, world_size: int) -> Iterator[int]:
    """Yield the rank's neighbours, in an order in which every pair meets at the same time."""
    if world_size < 3:
        return
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # Pair i is (i, i + 1): even ones first, then odd ones, then the last one of an odd ring.
    rounds = {pair: pair % 2 for pair in range(world_size)}
    if world_size % 2:
        rounds[world_size - 1] = 2
    yield from (peer for _, peer in sorted([(rounds[left], left), (rounds[rank], right)]))
