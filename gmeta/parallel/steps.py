"""The steps that all ranks take together: whoever runs out of data still joins every collective."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gmeta.accumulate import MicroBatches
from gmeta.episodes import Episodes
from gmeta.parallel.ranks import Ranks
from gmeta.stopping import Stop
from metaio.batch import TaskBatch, empty_batch
from metaio.features import Features

Arranged = TypeVar("Arranged", Episodes, Episodes | MicroBatches)


@dataclass(frozen=True)
class StepTotals:
    """What all ranks together bring to a step."""

    num_terms: int
    num_rows: int
    ranks_with_data: int
    ranks_asked_to_stop: int


def in_step(
    batches: Iterator[TaskBatch],
    arrange: Callable[[TaskBatch], Arranged],
    features: Features,
    ranks: Ranks,
    stop: Stop | None = None,
) -> Iterator[tuple[Arranged, StepTotals]]:
    """This rank's episodes, on its device, and the totals of each step, until no rank has data
    left.

    A rank that runs out feeds empty batches, so its peers' collectives complete; where no rank has
    a row there is no step. The totals of a step travel while the step before it computes; with them
    every rank learns that one was asked to stop, and `stop.agreed` ends the steps on all of them.
    """
    empty = empty_batch(
        len(features.tables), len(features.single), len(features.multi), len(features.dense)
    )

    def announce() -> tuple[Arranged, Tensor, dist.Work]:
        batch = next(batches, None)
        mine = arrange(empty if batch is None else batch)
        asked = stop is not None and stop.asked
        counts = torch.tensor([mine.num_terms, mine.num_rows, int(batch is not None), int(asked)])
        return (
            mine.to(ranks.device),
            counts,
            dist.all_reduce(counts, group=ranks.control, async_op=True),
        )

    upcoming = announce()
    while True:
        episodes, counts, work = upcoming
        work.wait()
        totals = StepTotals(*counts.tolist())
        if totals.ranks_with_data == 0:
            return
        if stop is not None and totals.ranks_asked_to_stop:
            stop.agreed = True
            return
        upcoming = announce()
        if totals.num_rows:
            yield episodes, totals
