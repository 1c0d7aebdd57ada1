"""learn2learn: MAML(head).clone() and .adapt() a task, as its examples do."""

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from learn2learn.algorithms.maml import MAML
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss

from peers.torch_common import TorchBatch, TorchPeer, episodes
from peers.workload import Rates, Workload


@final
class Learn2Learn(TorchPeer):
    """A clone of the head for each task."""

    def build(self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates) -> None:
        super().build(data, init, rates)
        self.maml = MAML(self.head, lr=rates.inner)

    def query_loss(self, prepared: TorchBatch) -> Tensor:
        losses = []
        for support, support_label, query, query_label in episodes(
            prepared, self.tables.read(prepared)
        ):
            learner = self.maml.clone()
            learner.adapt(mse_loss(learner(support), support_label))
            losses.append(mse_loss(learner(query), query_label))
        return torch.stack(losses).mean()


def make() -> Learn2Learn:
    """The peer."""
    return Learn2Learn()
