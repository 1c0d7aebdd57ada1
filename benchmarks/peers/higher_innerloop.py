"""higher: innerloop_ctx makes a functional head and a differentiable SGD for each task."""

from typing import final

import higher
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from peers.torch_common import TorchBatch, TorchPeer, episodes


@final
class Higher(TorchPeer):
    """higher's MAML example, with the sum over tasks differentiated once."""

    def query_loss(self, prepared: TorchBatch) -> Tensor:
        inner = torch.optim.SGD(self.head.parameters(), lr=self.inner_rate)
        losses = []
        for support, support_label, query, query_label in episodes(
            prepared, self.tables.read(prepared)
        ):
            with higher.innerloop_ctx(self.head, inner, copy_initial_weights=False) as (
                head_t,
                inner_t,
            ):
                inner_t.step(mse_loss(head_t(support), support_label))
                losses.append(mse_loss(head_t(query), query_label))
        return torch.stack(losses).mean()


def make() -> Higher:
    """The peer."""
    return Higher()
