"""Measures the speed of each rank's own network link, and of its processor."""

import logging
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import final

import torch
import torch.distributed as dist

from gmeta.distributed.ranks import Ranks, gather_values

# No collective tells it: all ranks wait for the slowest.
SWAP_BYTES = 65_536  # much more than a link's latency, much less than a step
REPEATS = 2
SLOW = 4.0  # times the median
_log = logging.getLogger(__name__)


@final
class LinkProbe:
    """Swaps some bytes with both neighbours on a ring, one after the other."""

    def __init__(self, ranks: Ranks) -> None:
        # A pair is as slow as its slower link: a healthy rank beside a slow one has its other pair
        # fast, and a rank both of whose pairs are slow is slow itself.
        self._group = ranks.control
        self._peers = list(_order_neighbours(ranks.rank, ranks.world_size))
        self._token = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        self._load = (
            torch.zeros(SWAP_BYTES, dtype=torch.uint8),
            torch.zeros(SWAP_BYTES, dtype=torch.uint8),
        )

    def swap_s(self) -> float:
        """Collective. Return the seconds of a swap with the faster neighbour; 0 below 3 ranks."""
        # Of two ranks none can tell whose link is slow.
        times_s = [self._time_swaps_s(peer) for peer in self._peers]
        return min(times_s, default=0.0)

    def _time_swaps_s(self, peer: int) -> float:
        self._swap(peer, self._token)  # both are here
        # The fastest counts: a process that once was not scheduled has no slow link.
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
    if world_size < 3:
        return
    # In an order in which every pair meets at the same time, or ranks would wait for each other.
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # Pair i is (i, i + 1): even ones first, then odd ones, then the last one of an odd ring.
    rounds = {pair: pair % 2 for pair in range(world_size)}
    if world_size % 2:
        rounds[world_size - 1] = 2
    yield from (peer for _, peer in sorted([(rounds[left], left), (rounds[rank], right)]))


def warn_of_slow_ranks(ranks: Ranks) -> None:
    """Warn, on rank 0, of ranks whose link or processor takes many times as long as most ranks'.
    Takes a second. Collective."""
    probe = LinkProbe(ranks)
    swap_s = min(probe.swap_s() for _ in range(3))
    measured = gather_values((socket.gethostname(), swap_s, _product_s(ranks)), ranks)
    for line in find_slow_ranks(measured or []):
        _log.warning("%s", line)


def find_slow_ranks(measured: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    """Yield a line for each slow rank; of each: host, seconds of a swap and of a product."""
    for place, what in ((1, "network link"), (2, "processor")):
        times_s = [float(of_rank[place]) for of_rank in measured]
        usual_s = statistics.median(times_s) if times_s else 0.0
        for rank, (host, *_) in enumerate(measured):
            if times_s[rank] > SLOW * usual_s > 0:
                yield (
                    f"rank {rank} on {host} is slow, and all ranks will wait for it: its {what} "
                    f"takes {1000 * times_s[rank]:.3g} ms where most take {1000 * usual_s:.3g}"
                )


def _product_s(ranks: Ranks) -> float:
    matrix, times_s = torch.ones(512, 512, device=ranks.device), []
    for _ in range(5):
        began_s = time.perf_counter()
        (matrix @ matrix).sum().item()  # waits for the device
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)
