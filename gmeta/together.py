"""What one rank does for all, and fails for all."""

from collections.abc import Callable

from gmeta.errors import GMetaError
from gmeta.parallel.ranks import Ranks, value_of_first
from metaio.errors import MetaIOError


def by_first(work: Callable[[], object], ranks: Ranks) -> None:
    """Rank 0 does it; every rank waits, and raises what it raised: a rank alone with a failure
    would leave the others in a collective.

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
