"""The learner's step by itself: no tables, no ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from gmeta.learner import MetaLearner
from gmeta.parallel.ranks import choose_cpu_matmul
from metaio.batch import TaskBatch

Step = Callable[[], Tensor]


def learner_step(learner: MetaLearner, batch: TaskBatch, width: int) -> Step:
    """Forward and backward from fetched rows of this width, returning the loss; arranging the batch
    is the host's work and not in it.
    """
    episodes = learner.arrange(batch)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), width).mul_(0.1).requires_grad_()
    precision = choose_cpu_matmul()

    def step() -> Tensor:
        torch.set_float32_matmul_precision(precision)
        rows_UD.grad = None
        learner.zero_grad()
        loss: Tensor = learner(rows_UD, episodes, 1 / episodes.num_terms)
        loss.backward()
        return loss.detach()

    return step
