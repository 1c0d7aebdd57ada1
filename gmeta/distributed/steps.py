"""The steps that all ranks take together: whoever runs out of data still joins every collective."""

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
from metaio.read.batch import TaskBatch, empty_batch

T = TypeVar("T")


@dataclass(frozen=True)
class StepTotals:
    """What all ranks together bring to a step."""

    num_terms: int
    num_reported: int
    num_rows: int
    ranks_with_data: int
    ranks_asked_to_stop: int

    @property
    def terms_per_reported(self) -> float:
        """Return the factor that turns a mean over all terms into the mean over those shown; 0
        where none is shown."""
        return self.num_terms / self.num_reported if self.num_reported else 0.0


@dataclass(frozen=True)
class _EnqueuedStep(Generic[Collated]):
    """A step that this rank has told the others about."""

    episodes: Collated
    counts: Tensor
    work: Pending

    def totals(self) -> StepTotals:
        """Wait for all ranks' counts, and return their sums."""
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
    on all of them. Where `adopt_new_plan` says before a step (on all ranks alike) that the last
    episodes asked for are planned anew, they are asked for and announced again: their ids have not
    travelled yet."""

    def enqueue() -> _EnqueuedStep[Collated]:
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
            stop.is_agreed = True
            return
        if totals.num_rows:
            begin()
            if now.episodes.fetch is not None:
                # First of all, so that nobody waits for rows of a rank that is late at arranging a
                # batch.
                now.episodes.fetch.look_up()
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
    """Yield the same batches. One that cannot be read or leased, or that the config does not fit,
    asks all ranks to stop before its step; `together.raise_first_problem` is to follow."""
    return idle_on_error(batches, batch_without_tasks(features), stop)


def idle_on_error(batches: Iterator[T], idle: T, stop: Stop) -> Iterator[T]:
    """Do as `stop_on_error` with batches in any form, of which `idle` is one without tasks."""
    try:
        yield from batches
        return
    except (GMetaError, MetaIOError, OSError) as error:
        stop.problem, stop.is_requested = error, True
    while True:  # a rank without a batch would count as one whose data has run out
        yield idle


def batch_without_tasks(features: Features) -> TaskBatch:
    """Return a batch without tasks, which keeps the collectives of a rank's peers whole."""
    return empty_batch(
        len(features.tables),
        len(features.single),
        len(features.multi),
        len(features.dense),
        features.num_labels,
    )
