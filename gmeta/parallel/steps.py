"""The steps that all ranks take together: whoever runs out of data still joins every collective."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gmeta.batches.accumulate import Arranged
from gmeta.errors import GMetaError
from gmeta.parallel.ranks import Ranks
from gmeta.parallel.sharded_learner import DistributedLearner
from gmeta.parallel.stopping import Stop
from gmeta.parallel.transport.transport import Pending
from metaio.errors import MetaIOError
from metaio.format.features import Features
from metaio.read.batch import TaskBatch, empty_batch

T = TypeVar("T")


@dataclass(frozen=True)
class StepTotals:
    """What all ranks together bring to a step."""

    num_terms: int
    num_shown: int
    num_rows: int
    ranks_with_data: int
    ranks_asked_to_stop: int

    @property
    def terms_per_shown(self) -> float:
        """Return the factor that turns a mean over all terms into the mean over those shown; 0
        where none is shown.
        """
        return self.num_terms / self.num_shown if self.num_shown else 0.0


@dataclass(frozen=True)
class _Upcoming(Generic[Arranged]):
    """A step that this rank has told the others about."""

    episodes: Arranged
    counts: Tensor
    work: Pending

    def totals(self) -> StepTotals:
        """Wait for all ranks' counts, and return their sums."""
        self.work.wait()
        return StepTotals(*self.counts.tolist())


def in_step(
    episodes: Iterator[Arranged],
    idle: Arranged,
    ranks: Ranks,
    stop: Stop | None = None,
    sharded: DistributedLearner | None = None,
    take_replanned: Callable[[], bool] = lambda: False,
    begin: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Arranged, StepTotals]]:
    """Yield this rank's episodes of each step and the totals of all ranks, until no rank has data
    left.

    A rank that runs out takes part with the `idle` episodes, so its peers' collectives complete;
    where no rank has a row there is no step. What three steps do in a turn of the loop, from top to
    bottom; `~~>` is under way, beside what follows (ids and their numbers only with `sharded`:
    without, every step sends its own):

        turn k - 2   | step k           |                  |
                     | arranged         |                  |
          k - 2      | their number ~~> |                  |
          computes   | and totals   ~~> | step k + 1       |
        turn k - 1   | ids ~~~~~~~~~~~> | arranged         |
          k - 1      | to the ranks     | their number ~~> |
          computes   | with the rows    | and totals   ~~> | step k + 2
        turn k       | totals are known |                  |
                     | `begin`          |                  |
                     | rows looked up   |                  |
                     | rows ~~~~~~~~~~> | ids ~~~~~~~~~~~> | arranged
          k computes | forward,         | to the ranks     | their number ~~>
          (yielded)  | backward, update | with the rows    | and totals   ~~>

    Rows are only looked up when their step begins, after the updates of the step before: the losses
    are those of one step after the other. `begin` comes before, as fbgemm takes the rate of an
    update with the lookup.

    With the totals every rank learns that one was asked to stop, and `stop.agreed` ends the steps
    on all of them. Where `take_replanned` says before a step (on all ranks alike) that the last
    episodes asked for are planned anew, they are asked for and announced again: their ids have not
    travelled yet.
    """

    def announce() -> _Upcoming[Arranged]:
        given = next(episodes, None)
        mine = idle if given is None else given
        if sharded is not None:
            mine = sharded.local.exchange.announce(mine)
        has_data, asked = given is not None, stop is not None and stop.asked
        # In one message: what the step divides by, who has data and who is to stop.
        counts = torch.tensor(
            [mine.num_terms, mine.num_shown, mine.num_rows, int(has_data), int(asked)]
        )
        return _Upcoming(mine, counts, ranks.transport.add(counts))

    def send(step: _Upcoming[Arranged]) -> _Upcoming[Arranged]:
        if step.episodes.fetch is not None:
            step.episodes.fetch.send()
        return step

    # Two ahead: the ids of the one travel while the numbers of the other do.
    now, after = send(announce()), announce()
    while (totals := now.totals()).ranks_with_data:
        if stop is not None and totals.ranks_asked_to_stop:
            stop.agreed = True
            return
        if totals.num_rows:
            begin()
            if now.episodes.fetch is not None:
                # First of all, so that nobody waits for rows of a rank that is late at arranging a
                # batch.
                now.episodes.fetch.look_up()
        if take_replanned():
            # Its sum is under way on all ranks: it ends before another takes its place.
            after.work.wait()
            after = announce()
        upcoming, after = send(after), announce()
        # Without a row on any rank there is nothing to compute.
        if totals.num_rows:
            yield now.episodes, totals
        now = upcoming


def stopping_if_wrong(
    batches: Iterator[TaskBatch], features: Features, stop: Stop
) -> Iterator[TaskBatch]:
    """Yield the same batches. One that cannot be read or leased, or that the config does not fit,
    asks all ranks to stop before its step; `together.raise_first_problem` is to follow.
    """
    return idle_if_wrong(batches, no_tasks(features), stop)


def idle_if_wrong(batches: Iterator[T], idle: T, stop: Stop) -> Iterator[T]:
    """Do as `stopping_if_wrong` with batches in any form, of which `idle` is one without tasks."""
    try:
        yield from batches
        return
    except (GMetaError, MetaIOError, OSError) as error:
        stop.problem, stop.asked = error, True
    while True:  # a rank without a batch would count as one whose data has run out
        yield idle


def no_tasks(features: Features) -> TaskBatch:
    """Return a batch without tasks, which keeps the collectives of a rank's peers whole."""
    return empty_batch(
        len(features.tables),
        len(features.single),
        len(features.multi),
        len(features.dense),
        features.num_labels,
    )
