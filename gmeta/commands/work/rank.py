"""How a rank begins and ends, whatever it does in between."""

from collections.abc import Callable, Mapping
from typing import Any

from gmeta.commands.work.told_once import told_once
from gmeta.parallel.ranks import Ranks, lost_peers_explained, start_ranks, stop_ranks
from gmeta.parallel.stopping import end_with_agent
from gmeta.runs.alike import check_alike


def be_rank(
    device: str,
    timeout_s: int,
    told: Mapping[str, Any],
    work: Callable[[Ranks], None],
) -> None:
    """Join the other ranks (see start_ranks), do the work if all were `told` the same, and leave;
    an error ends all of them."""
    end_with_agent()
    with lost_peers_explained():
        ranks = start_ranks(device, timeout_s)
        with told_once(ranks):
            check_alike(told, ranks)
            work(ranks)
        stop_ranks()
