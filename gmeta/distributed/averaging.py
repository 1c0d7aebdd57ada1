"""Averages the layers' gradients over ranks on the CPU, in place of DistributedDataParallel."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gmeta.distributed.ranks import Ranks
from gmeta.distributed.transport.transport import Pending
from gmeta.platform.internals import call_after_backward


class LayerAverage:
    """Averages the layers' gradients over ranks after every backward; layers start as rank 0's."""

    def __init__(self, layers: Iterable[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        self._layers = [layer for layer in layers if layer.requires_grad]
        self._sizes = [layer.numel() for layer in self._layers]
        self._missing = len(self._layers)
        self._sum: tuple[Tensor, Pending] | None = None
        for layer in self._layers:
            dist.broadcast(layer.detach(), src=0)  # of all, also where `ranks` are some
            # All gradients travel as one message once the last is there, while the rest of backward
            # takes those of the rows to their owners.
            layer.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, _: Tensor) -> None:
        if self._missing == len(self._layers):
            call_after_backward(self._finish)
        self._missing -= 1
        if not self._missing:
            grads = [layer.grad for layer in self._layers if layer.grad is not None]
            total = torch.cat([grad.flatten() for grad in grads])
            self._sum = total, self._ranks.transport.add(total)

    def _finish(self) -> None:
        # Behind the last operation of backward: nothing waits for the sum before.
        missing, self._missing = self._missing, len(self._layers)
        if self._sum is None:
            raise RuntimeError(f"backward gave {missing} of the layers no gradient to average")
        (total, pending), self._sum = self._sum, None
        pending.wait()
        total.div_(self._ranks.world_size)
        # The gradients are parts of the message from now on: nothing is copied back.
        parts = total.split_with_sizes(self._sizes)
        for layer, part in zip(self._layers, parts, strict=True):
            layer.grad = part.view_as(layer).to(layer.dtype)
