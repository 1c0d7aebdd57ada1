"""How a rank begins and ends, whatever it does between."""

from collections.abc import Callable

from gmeta.commands.work.told_once import told_once
from gmeta.parallel.ranks import Ranks, lost_peers_explained, start_ranks, stop_ranks
from gmeta.parallel.stopping import end_with_agent


def be_rank(
    device: str, timeout_s: int, work: Callable[[Ranks], None], *, shared_memory: bool = False
) -> None:
    """Join the other ranks, do the work, leave; see start_ranks."""
    end_with_agent()
    with lost_peers_explained():
        ranks = start_ranks(device, timeout_s, shared_memory=shared_memory)
        with told_once(ranks):
            work(ranks)
        stop_ranks()
