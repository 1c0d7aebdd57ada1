"""The learner's step by itself: no tables, no ranks."""

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from gmeta.learner import MetaLearner
from metaio.read.batch import TaskBatch

Step = Callable[[], Tensor]


def learner_step(learner: MetaLearner, batches: Sequence[TaskBatch], width: int) -> Step:
    """Forward and backward from fetched rows of this width, returning the loss; every call takes
    the next batch. Arranging them is the host's work and not in it."""
    steps = []
    for batch in batches:
        rows_UD = torch.randn(batch.unique_ids_U.numel(), width).mul_(0.1).requires_grad_()
        steps.append((learner.collate(batch), rows_UD))
    upcoming = cycle(steps)

    def step() -> Tensor:
        episodes, rows_UD = next(upcoming)
        rows_UD.grad = None
        learner.zero_grad()
        loss: Tensor = learner(rows_UD, episodes, 1 / episodes.num_terms)
        loss.backward()
        return loss.detach()

    return step
