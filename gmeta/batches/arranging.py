"""How a learner takes its training batches: all that arranging one asks of it, and none of its
weights, so that another process can do it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gmeta.adaptation.plan import Route
from gmeta.batches.episodes import Episodes, plain_rows, side_lengths, task_groups
from gmeta.batches.for_fused import padded_tasks, similar_tasks
from gmeta.batches.item_statistics import FoldStatistics
from gmeta.batches.support_statistics import SupportStatistics
from gmeta.rows.rectangles import FusedLayout
from metaio.read.batch import TaskBatch


@dataclass(frozen=True)
class Arranging:
    """Integer bookkeeping on the host, from a batch to the episodes of a step."""

    device: str  # the kind that the learner computes on
    items: FoldStatistics | None
    statistics: SupportStatistics
    route: Route
    plain_epochs: int  # the first ones are of plain training
    layout: FusedLayout | None  # of the fused route
    rows_per_task: bool
    least_gain: float  # rows that one more group of tasks must save in that loop
    learns_from_support: bool

    def in_epoch(self, epoch: int) -> Callable[[TaskBatch], Episodes]:
        """Return `arranged` for the batches of one epoch."""
        return lambda batch: self.arranged(batch, epoch)

    def arranged(self, batch: TaskBatch, epoch: int) -> Episodes:
        """Return what the learner's `forward` takes in this epoch of a run, counted from 0."""
        if self.items is not None:
            batch = self.items.widened(batch)
        batch = self.statistics.widened(batch)
        if self.route == "plain" or epoch < self.plain_epochs:
            return plain_rows(batch, self.device)
        if self.layout is not None:
            groups = similar_tasks(batch, self.layout)
            # Without a support row in the whole batch nothing adapts, and the fused loop has no
            # rectangle.
            if any(group.support_rows for group in groups):
                return padded_tasks(batch, groups, self.layout)
        episodes = task_groups(batch, self.rows_per_task, self.least_gain, self.device)
        if self.learns_from_support:
            support_T, query_T = side_lengths(batch)
            # Reptile's terms are tasks with support rows; a loss is shown of those with query rows,
            # too.
            num_terms, num_shown = np.count_nonzero([support_T, support_T * query_T], axis=1)
            episodes = replace(episodes, num_terms=int(num_terms), num_shown=int(num_shown))
        return episodes
