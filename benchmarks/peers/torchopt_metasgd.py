"""TorchOpt: its differentiable MetaSGD steps the head, whose state is recovered after each task."""

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
import torchopt
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss

from peers.torch_common import TorchBatch, TorchPeer, episodes
from peers.workload import Rates, Workload


@final
class TorchOpt(TorchPeer):
    """TorchOpt's MAML example: extract_state_dict, step, query loss, recover_state_dict."""

    def build(self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates) -> None:
        super().build(data, init, rates)
        self.inner = torchopt.MetaSGD(self.head, lr=rates.inner)

    def query_loss(self, prepared: TorchBatch) -> Tensor:
        theta = torchopt.extract_state_dict(self.head, by="reference", detach_buffers=True)
        inner_state = torchopt.extract_state_dict(self.inner, by="reference")
        losses = []
        for support, support_label, query, query_label in episodes(
            prepared, self.tables.read(prepared)
        ):
            self.inner.step(mse_loss(self.head(support), support_label))
            losses.append(mse_loss(self.head(query), query_label))
            torchopt.recover_state_dict(self.head, theta)
            torchopt.recover_state_dict(self.inner, inner_state)
        return torch.stack(losses).mean()


def make() -> TorchOpt:
    """The peer."""
    return TorchOpt()
