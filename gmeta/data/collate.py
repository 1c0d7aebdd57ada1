"""How a learner takes its training batches: all that arranging one asks of it, and none of its
weights, so that another process can do it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gmeta.adaptation.layout.padded_layout import FusedLayout
from gmeta.data.episodes import Episodes, collate_plain_rows, collate_task_groups, side_lengths
from gmeta.data.features.item_statistics import FoldStatistics
from gmeta.data.features.support_statistics import SupportStatistics
from gmeta.data.fused_batches import collate_padded, group_similar_tasks
from metaio.read.batch import TaskBatch


@dataclass(frozen=True)
class CollateOptions:
    """Integer bookkeeping on the host, from a batch to the episodes of a step."""

    device: str  # the kind that the learner computes on
    items: FoldStatistics | None
    statistics: SupportStatistics
    is_plain: bool
    plain_epochs: int  # the first ones are of plain training
    layout: FusedLayout | None  # None: in the general loop
    rows_per_task: bool
    least_gain: float  # rows that one more group of tasks must save in that loop
    learns_from_support: bool

    def collator_of(self, epoch: int) -> Callable[[TaskBatch], Episodes]:
        """Return `arranged` for the batches of one epoch."""
        return lambda batch: self.collate(batch, epoch)

    def collate(self, batch: TaskBatch, epoch: int) -> Episodes:
        """Return what the learner's `forward` takes in this epoch of a run, counted from 0."""
        if self.items is not None:
            batch = self.items.with_features(batch)
        batch = self.statistics.with_features(batch)
        if self.is_plain or epoch < self.plain_epochs:
            return collate_plain_rows(batch, self.device)
        if self.layout is not None:
            groups = group_similar_tasks(batch, self.layout)
            # Without a support row in the whole batch nothing adapts, and the fused loop has no
            # rectangle.
            if any(group.support_rows for group in groups):
                return collate_padded(batch, groups, self.layout)
        episodes = collate_task_groups(batch, self.rows_per_task, self.least_gain, self.device)
        if self.learns_from_support:
            support_T, query_T = side_lengths(batch)
            # Reptile's terms are tasks with support rows; a loss is shown of those with query rows,
            # too.
            num_terms, num_reported = np.count_nonzero([support_T, support_T * query_T], axis=1)
            episodes = replace(episodes, num_terms=int(num_terms), num_reported=int(num_reported))
        return episodes
