"""Raise one rank's failure on all ranks, so that none hangs in a collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gmeta.errors import GMetaError
from gmeta.parallel.ranks import Ranks, gather_to_first, value_of_first
from gmeta.parallel.stopping import Stop
from metaio.errors import MetaIOError


def by_first(work: Callable[[], object], ranks: Ranks) -> None:
    """Run `work` on rank 0 while every rank waits; raise on all ranks what it raised.

    Raises:
        GMetaError, MetaIOError, OSError: as `work`.
    """
    problem: Exception | None = None
    if ranks.rank == 0:
        try:
            work()
        except (GMetaError, MetaIOError, OSError) as error:
            problem = error
    problem = value_of_first(problem, ranks)
    if problem is not None:
        raise problem


def by_all(work: Callable[[], object], ranks: Ranks) -> None:
    """Run every rank's part of `work`, wait for the others, and raise on all ranks what the first
    of them raised.

    Raises:
        GMetaError, MetaIOError, OSError: as `work`.
    """
    problem: Exception | None = None
    try:
        work()
    except (GMetaError, MetaIOError, OSError) as error:
        problem = error
    _raise_first(problem, ranks)


@contextmanager
def asking_to_stop(stop: Stop) -> Iterator[None]:
    """Turn a failure of this rank inside a step that all take into a request that all ranks stop
    before one of the next steps; `raise_first_problem` is to follow.
    """
    try:
        yield
    except (GMetaError, OSError) as error:
        stop.problem, stop.asked = error, True


def raise_first_problem(stop: Stop, ranks: Ranks) -> None:
    """Raise on all ranks what asked the first of them to stop, if it was a problem. Collective.

    Raises:
        GMetaError, MetaIOError, OSError: see steps.stopping_if_wrong.
    """
    _raise_first(stop.problem, ranks)


def why_stopped(stop: Stop, ranks: Ranks) -> str:
    """Return on all ranks why a callback of the first of them asked to stop; "" where SIGTERM did.
    Collective.

    Raises:
        GMetaError, MetaIOError, OSError: a problem asked; see steps.stopping_if_wrong.
    """
    raise_first_problem(stop, ranks)
    reasons = gather_to_first(stop.reason, ranks) or []
    return value_of_first(next(filter(None, reasons), ""), ranks)


def _raise_first(problem: Exception | None, ranks: Ranks) -> None:
    if problem is not None and ranks.world_size > 1:
        problem.add_note(f"met by rank {ranks.rank}")
    problems = gather_to_first(problem, ranks) or []
    first = value_of_first(next((one for one in problems if one is not None), None), ranks)
    if first is not None:
        raise first
