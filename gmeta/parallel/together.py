"""What one rank does for all, or meets alone, and all fail of: a rank alone with a failure would
leave the others in a collective.
"""

from collections.abc import Callable, Iterator

from gmeta.errors import ConfigError, GMetaError
from gmeta.parallel.ranks import Ranks, gather_to_first, value_of_first
from gmeta.parallel.stopping import Stop
from metaio.batch import TaskBatch, empty_batch
from metaio.errors import MetaIOError
from metaio.features import Features


def by_first(work: Callable[[], object], ranks: Ranks) -> None:
    """Rank 0 does it; every rank waits, and raises what it raised.

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


def stopping_if_wrong(
    batches: Iterator[TaskBatch], features: Features, stop: Stop
) -> Iterator[TaskBatch]:
    """The same batches. One that cannot be read, or that the config does not fit, asks all ranks to
    stop before its step; `raise_first_problem` is to follow.
    """
    try:
        yield from batches
        return
    except (ConfigError, MetaIOError, OSError) as error:
        stop.problem, stop.asked = error, True
    empty = empty_batch(
        len(features.tables), len(features.single), len(features.multi), len(features.dense)
    )
    while True:  # a rank without a batch would count as one whose data has run out
        yield empty


def raise_first_problem(stop: Stop, ranks: Ranks) -> None:
    """On all ranks what asked the first of them to stop, if it was a problem. Collective.

    Raises:
        ConfigError, MetaIOError, OSError: see `stopping_if_wrong`.
    """
    if stop.problem is not None and ranks.world_size > 1:
        stop.problem.add_note(f"met by rank {ranks.rank}")
    problems = gather_to_first(stop.problem, ranks) or []
    first = value_of_first(next((one for one in problems if one is not None), None), ranks)
    if first is not None:
        raise first
