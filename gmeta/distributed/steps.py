"""The steps that all ranks take together: a rank without data still joins every collective."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gmeta.data.accumulate import Collated
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.stopping import Stop
from gmeta.distributed.transport.transport import Pending
from gmeta.errors import GMetaError
from metaio.errors import MetaIOError
from metaio.format.features import Features
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose

T = TypeVar("T")


@dataclass(frozen=True)
class StepTotals:
    """The sums over all ranks for a step."""

    num_terms: int
    num_reported: int
    num_rows: int
    ranks_with_data: int
    ranks_asked_to_stop: int

    @property
    def terms_per_reported(self) -> float:
        """Return the factor from a mean over all terms to one over reported ones; 0 without any."""
        return self.num_terms / self.num_reported if self.num_reported else 0.0


@dataclass(frozen=True)
class _EnqueuedStep(Generic[Collated]):
    episodes: Collated
    counts: Tensor
    work: Pending

    def totals(self) -> StepTotals:
        self.work.wait()
        return StepTotals(*self.counts.tolist())


def iterate_steps(
    episodes: Iterator[Collated],
    idle: Collated,
    ranks: Ranks,
    stop: Stop | None = None,
    sharded: DistributedLearner | None = None,
    adopt_new_plan: Callable[[], bool] = lambda: False,
    begin: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Collated, StepTotals]]:
    """Yield this rank's episodes of each step and the totals of all ranks, until no rank has data
    left.

    Three steps in a turn of the loop, from top to bottom; `~~>` is under way, beside what follows
    (ids and their numbers only with `sharded`: without, every step sends its own):

        turn k - 2   | step k           |                  |
                     | collated         |                  |
          k - 2      | their number ~~> |                  |
          computes   | and totals   ~~> | step k + 1       |
        turn k - 1   | ids ~~~~~~~~~~~> | collated         |
          k - 1      | to the ranks     | their number ~~> |
          computes   | with the rows    | and totals   ~~> | step k + 2
        turn k       | totals are known |                  |
                     | `begin`          |                  |
                     | rows looked up   |                  |
                     | rows ~~~~~~~~~~> | ids ~~~~~~~~~~~> | collated
          k computes | forward,         | to the ranks     | their number ~~>
          (yielded)  | backward, update | with the rows    | and totals   ~~>"""

    def enqueue() -> _EnqueuedStep[Collated]:
        # A rank that runs out takes part with the `idle` episodes: its peers' collectives complete.
        batch = next(episodes, None)
        mine = idle if batch is None else batch
        if sharded is not None:
            mine = sharded.local.exchange.enqueue(mine)
        has_data, is_stop_requested = batch is not None, stop is not None and stop.is_requested
        # In one message: what the step divides by, who has data and who is to stop.
        counts = torch.tensor(
            [
                mine.num_terms,
                mine.num_reported,
                mine.num_rows,
                int(has_data),
                int(is_stop_requested),
            ]
        )
        return _EnqueuedStep(mine, counts, ranks.transport.add(counts))

    def send(step: _EnqueuedStep[Collated]) -> _EnqueuedStep[Collated]:
        if step.episodes.fetch is not None:
            step.episodes.fetch.send()
        return step

    # Two ahead: the ids of the one travel while the numbers of the other do.
    now, following = send(enqueue()), enqueue()
    while (totals := now.totals()).ranks_with_data:
        if stop is not None and totals.ranks_asked_to_stop:
            # With the totals every rank learns of a request to stop: all end before the same step.
            stop.is_agreed = True
            return
        if totals.num_rows:
            # Before the lookup: fbgemm takes the rate of an update with it.
            begin()
            if now.episodes.fetch is not None:
                # Only now, after the updates of the step before: losses are those of one step after
                # the other. First of all: no rank then waits for one that is late at collating.
                now.episodes.fetch.look_up()
        # On all ranks alike: the batch enqueued last is planned anew, its ids have not travelled.
        if adopt_new_plan():
            # Its sum is under way on all ranks: it ends before another takes its place.
            following.work.wait()
            following = enqueue()
        upcoming, following = send(following), enqueue()
        # Without a row on any rank there is nothing to compute.
        if totals.num_rows:
            yield now.episodes, totals
        now = upcoming


def stop_on_error(
    batches: Iterator[TaskBatch], features: Features, stop: Stop
) -> Iterator[TaskBatch]:
    """Yield the same batches; after an error ask all ranks to stop before its step."""
    return idle_on_error(batches, batch_without_tasks(features), stop)


def idle_on_error(batches: Iterator[T], idle: T, stop: Stop) -> Iterator[T]:
    """Do as `stop_on_error` with batches in any form; `idle` has no tasks."""
    try:
        yield from batches
        return
    except (GMetaError, MetaIOError, OSError) as error:
        stop.problem, stop.is_requested = error, True
    while True:  # a rank without a batch would count as one whose data has run out
        yield idle


def batch_without_tasks(features: Features) -> TaskBatch:
    """Return a batch without tasks, with which a rank joins its peers' collectives."""
    return compose(features, [])
