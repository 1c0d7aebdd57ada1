"""Rows and gradients on the wire, in 16 bits where the config says so."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from gmeta.distributed.transport.transport import Swap, Transport

FLOAT16_MAX = 65_504.0


@final
class NarrowTransport:
    """Sends values as `dtype`, one of 16 bits; None: as they are."""

    def __init__(self, transport: Transport, dtype: torch.dtype | None) -> None:
        self._transport, self.dtype = transport, dtype
        self.num_others = transport.num_others

    def send(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
        scale: float = 1.0,
    ) -> Swap:
        """Start a swap, see Transport; `out` is filled unless values are narrowed."""
        out = out if self.dtype is None else None
        return self._transport.swap(self._narrow(values, scale), send_counts, receive_counts, out)

    def receive(self, swap: Swap, scale: float = 1.0) -> list[Tensor]:
        """Return the other ranks' values, rank by rank; waits for them."""
        return [self._widen(part, scale) for part in swap.parts()]

    def round(self, values: Tensor, scale: float) -> Tensor:
        """Return values as the ranks see them to which they are sent."""
        return self._widen(self._narrow(values, scale), scale)

    def _narrow(self, values: Tensor, scale: float) -> Tensor:
        if self.dtype is None:
            return values
        # `scale` brings gradients to the middle of float16's range.
        if self.dtype == torch.float16:
            values = (values * scale).clamp_(-FLOAT16_MAX, FLOAT16_MAX)
        # gloo does not know bfloat16: its bits travel as float16.
        return values.to(self.dtype).view(torch.float16)

    def _widen(self, values: Tensor, scale: float) -> Tensor:
        if self.dtype is None:
            return values
        unscaled = 1 / scale if self.dtype == torch.float16 else 1.0
        return values.view(self.dtype).float().mul_(unscaled)
