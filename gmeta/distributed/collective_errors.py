"""Raises one rank's failure on all ranks, so that none hangs in a collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gmeta.distributed.ranks import Ranks, broadcast_value, gather_values
from gmeta.distributed.stopping import Stop
from gmeta.errors import GMetaError
from metaio.errors import MetaIOError


def run_on_first(work: Callable[[], object], ranks: Ranks) -> None:
    """Run `work` on rank 0 while every rank waits; raise its error on all ranks. Collective."""
    problem: Exception | None = None
    if ranks.rank == 0:
        try:
            work()
        except (GMetaError, MetaIOError, OSError) as error:
            problem = error
    problem = broadcast_value(problem, ranks)
    if problem is not None:
        raise problem


def run_on_all(work: Callable[[], object], ranks: Ranks) -> None:
    """Run every rank's part of `work`; raise the first rank's error on all ranks. Collective."""
    problem: Exception | None = None
    try:
        work()
    except (GMetaError, MetaIOError, OSError) as error:
        problem = error
    _raise_first(problem, ranks)


@contextmanager
def request_stop_on_error(stop: Stop) -> Iterator[None]:
    """Turn this rank's error into a request that all ranks stop before one of the next steps."""
    try:
        # Raised here it would leave the others in a collective: `raise_first_problem` follows.
        yield
    except (GMetaError, OSError) as error:
        stop.problem, stop.is_requested = error, True


def raise_first_problem(stop: Stop, ranks: Ranks) -> None:
    """Collective. If an error made a rank ask to stop, raise the lowest rank's on every rank."""
    _raise_first(stop.problem, ranks)


def gather_stop_reason(stop: Stop, ranks: Ranks) -> str:
    """Collective. Return on all ranks the first callback's reason to stop; "" for SIGTERM."""
    raise_first_problem(stop, ranks)
    reasons = gather_values(stop.reason, ranks) or []
    return broadcast_value(next(filter(None, reasons), ""), ranks)


def _raise_first(problem: Exception | None, ranks: Ranks) -> None:
    if problem is not None and ranks.world_size > 1:
        # The line then names the rank; a single one needs no number.
        problem.add_note(f"met by rank {ranks.rank}")
    problems = gather_values(problem, ranks) or []
    first = broadcast_value(next((one for one in problems if one is not None), None), ranks)
    if first is not None:
        raise first
