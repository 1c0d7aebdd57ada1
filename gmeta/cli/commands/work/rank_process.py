"""The beginning and the end of a rank, whatever its work."""

from collections.abc import Callable, Mapping
from typing import Any

from gmeta.cli.commands.work.shared_error import report_once
from gmeta.distributed.link_probe import warn_of_slow_ranks
from gmeta.distributed.ranks import Ranks, explain_lost_peers, start_ranks, stop_ranks
from gmeta.distributed.reachability import is_spread
from gmeta.runs.rank_agreement import check_alike


def run_as_rank(
    device: str, timeout_s: int, alike: Mapping[str, Any], work: Callable[[Ranks], None]
) -> None:
    """Join the other ranks (see start_ranks), work if `alike` is the same on all, and leave."""
    with explain_lost_peers():
        ranks = start_ranks(device, timeout_s)
        # An error on one rank ends all of them: the others would wait in a collective.
        with report_once(ranks):
            check_alike(alike, ranks)
            if is_spread():
                warn_of_slow_ranks(ranks)
            work(ranks)
        stop_ranks()
