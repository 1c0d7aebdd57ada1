"""The reference: a plain loop over tasks with torch.autograd. Every other peer must equal it."""

from typing import final

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import mse_loss

from peers.torch_common import TorchBatch, TorchPeer, episodes


@final
class Loop(TorchPeer):
    """theta_t = theta - alpha * grad L_support(theta), one task after the other."""

    gathers_rows = True

    def query_loss(self, prepared: TorchBatch) -> Tensor:
        theta = dict(self.head.named_parameters())
        losses = []
        for support, support_label, query, query_label in episodes(
            prepared, self.tables.read(prepared)
        ):
            loss = mse_loss(self.head(support), support_label)
            grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
            updates = zip(theta.items(), grads, strict=True)
            theta_t = {name: weight - self.inner_rate * grad for (name, weight), grad in updates}
            losses.append(mse_loss(functional_call(self.head, theta_t, (query,)), query_label))
        return torch.stack(losses).mean()


def make() -> Loop:
    """The peer."""
    return Loop()
