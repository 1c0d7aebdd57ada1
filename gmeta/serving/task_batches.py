"""Batches of a request's rows, with what they have of their tasks' support rows.

Shape suffixes: T tasks, N rows, K dense columns, E chosen episodes"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from gmeta.data.hash_rng import reorder_rows
from gmeta.serving.encoded_rows import EncodedColumns, empty_rows, join_rows
from gmeta.serving.episodes import task_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gmeta.learner import MetaLearner
    from gmeta.serving.task_states import AdaptedTensors
    from metaio.format.features import Features
    from metaio.read.batch import TaskBatch


class TaskBatches:
    """Makes the batches of a learner."""

    def __init__(self, learner: MetaLearner, features: Features) -> None:
        self._learner, self._features = learner, features

    @property
    def keeps_support(self) -> bool:
        """Return whether later query rows need the support rows: statistics of them, or events."""
        return self._learner.statistics.width > 0 or self._learner.events is not None

    def make(self, *sides: tuple[EncodedColumns, Sequence[int]]) -> TaskBatch:
        """Return a batch of support and query rows, which stand task by task, of these lengths."""
        support, query = (rows for rows, _ in sides)
        chosen_E = np.arange(support.num_rows), np.arange(query.num_rows)
        support_T, query_T = (np.array(lengths, np.int64) for _, lengths in sides)
        batch = task_batch(self._features, support, query, chosen_E, (support_T, query_T))
        return self._learner.with_items(batch)

    def make_query(
        self, tasks: AdaptedTensors, rows: EncodedColumns, lengths: Sequence[int]
    ) -> TaskBatch:
        """Return rows as query sides alone, with the statistics of each task's support."""
        nothing = empty_rows(self._features)
        batch = self.make((nothing, [0] * len(lengths)), (rows, lengths))
        reads_events = self._learner.events is not None and not tasks.remembers
        if not (reads_events or self._learner.statistics.width):
            return batch
        known = [support or nothing for support in tasks.supports]
        known_lengths = [support.num_rows for support in known]
        # Statistics are of a task's support, so one batch has both sides to compute them; only the
        # query rows are used further.
        sides = (join_rows(known), known_lengths), (rows, lengths)
        both = self._learner.with_support(self.make(*sides))
        # Both sides stand in turn, task by task.
        turns = np.stack([both.support_lengths_T.numpy(), np.array(lengths)], axis=1).ravel()
        is_query_N = np.repeat(np.tile([False, True], len(lengths)), turns)
        if reads_events:
            # Of the rows with their support the query alone, whose events the support is.
            order_N = np.flatnonzero(is_query_N)
            return reorder_rows(both, order_N, np.zeros(len(lengths), np.int64))
        return replace(batch, dense_NK=both.dense_NK[torch.from_numpy(is_query_N)])
