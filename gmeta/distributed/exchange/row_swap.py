"""Rows on their way from the ranks that hold them, and their gradients on the way back: one
AlltoAll each way. Among ranks the others stand in order, then this one.

Shape suffixes: N rows, W ranks or workers, G groups of tables"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.distributed.tables.rows_to_send import RowsToSend
from gmeta.distributed.tables.updates import FastGroup
from gmeta.distributed.transport.transport import Swap, Transport

FLOAT16_MAX = 65_504.0


class RowSwap:
    """One step, as one rank sees it: rows are looked up and on their way once it is made.

    `to_send_G` are the rows of each group that this rank sends, rank by rank, `counts_WG` how many
    of them go to each; `num_requested` the values that it requests of each."""

    def __init__(
        self,
        transport: Transport,
        groups: Sequence[FastGroup],
        device: torch.device,
        wire_dtype: torch.dtype | None,
        to_send_G: Sequence[RowsToSend],
        counts_WG: Sequence[Sequence[int]],
        num_requested: Sequence[int],
        on_gradient: Callable[[Tensor], None],
    ) -> None:
        self.groups, self.to_send_G = groups, to_send_G
        # The values of each group that go to each rank.
        self.sizes_WG = [
            [count * group.width for count, group in zip(counts_G, groups, strict=True)]
            for counts_G in counts_WG
        ]
        self.num_sent, self.num_requested = (
            [sum(sizes_G) for sizes_G in self.sizes_WG],
            num_requested,
        )
        self.wire_dtype = wire_dtype  # None: as they are
        self.on_gradient = on_gradient
        self._transport, self._device = transport, device
        self.requested = torch.empty(sum(num_requested), device=device)
        self.remote_values, own = self.requested.split_with_sizes(
            [sum(num_requested[:-1]), num_requested[-1]]
        )
        num_remote = sum(self.num_sent[:-1])
        send_buffer = torch.empty(num_remote, device=device)
        rows_of_group = [
            rows.row_N.split_with_sizes([rows.row_N.numel() - count, count])
            for rows, count in zip(to_send_G, counts_WG[-1], strict=True)
        ]
        if num_remote:
            remote_rows = [remote_N for remote_N, _ in rows_of_group]
            self._look_up(remote_rows, self.sizes_WG[:-1], send_buffer)
        self.message = self.send(send_buffer, self.num_sent, num_requested, self.remote_values)
        # This rank's own rows are looked up while those of the others travel.
        self._look_up([own_N for _, own_N in rows_of_group], self.sizes_WG[-1:], own)

    def values(self, gradient_scale: float) -> Tensor:
        """Return the values that this rank requests, flat, rank by rank, differentiable once."""
        # No table is in the graph; backward must come here, if only to join the AlltoAll.
        root = torch.zeros(0, device=self._device, requires_grad=True)
        requested: Tensor = _SwapRows.apply(self, gradient_scale, root)
        return requested

    def send(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        remote_values: Tensor | None = None,
        scale: float = 1.0,
    ) -> Swap:
        """Start to send each other rank `send_counts` of the values."""
        if self.wire_dtype is not None:
            # `scale` brings gradients to the middle of float16's range.
            if self.wire_dtype == torch.float16:
                values = (values * scale).clamp_(-FLOAT16_MAX, FLOAT16_MAX)
            # gloo does not know bfloat16: its bits travel as float16.
            values, remote_values = values.to(self.wire_dtype).view(torch.float16), None
        return self._transport.swap(values, send_counts[:-1], receive_counts[:-1], remote_values)

    def receive(self, swap: Swap, scale: float = 1.0) -> list[Tensor]:
        """Return the other ranks' values in float32, rank by rank; waits for them."""
        parts = swap.parts()
        if self.wire_dtype is None:
            return parts
        unscaled = 1 / scale if self.wire_dtype == torch.float16 else 1.0
        return [part.view(self.wire_dtype).float().mul_(unscaled) for part in parts]

    def update(self, grad_W: list[Tensor]) -> None:
        """Pass the groups the gradients of the rows that they sent to each rank, flat."""
        parts_WG = [
            values.split_with_sizes(sizes_G)
            for values, sizes_G in zip(grad_W, self.sizes_WG, strict=True)
        ]
        for index, (group, to_send) in enumerate(zip(self.groups, self.to_send_G, strict=True)):
            parts_W = [parts_G[index] for parts_G in parts_WG]
            # As data-parallel averaging divides the layers' gradients; one rank's are the mean.
            mean = parts_W[0] if len(parts_W) == 1 else torch.cat(parts_W).div_(len(parts_W))
            group.take(to_send, mean.view(-1, group.width))

    def _look_up(self, row_G: Sequence[Tensor], sizes_WG: list[list[int]], values: Tensor) -> None:
        starts_G, first = [0] * len(self.groups), 0
        for sizes_G in sizes_WG:
            for index, (group, size) in enumerate(zip(self.groups, sizes_G, strict=True)):
                count = size // group.width
                rows = row_G[index].narrow(0, starts_G[index], count)
                group.look_up(rows, values.narrow(0, first, size).view(-1, group.width))
                starts_G[index] += count
                first += size


class _SwapRows(torch.autograd.Function):
    """Returns the rows; backward takes the gradients to the rows' owners, which update them."""

    @staticmethod
    def forward(ctx: Any, swap: RowSwap, gradient_scale: float, _: Tensor) -> Tensor:
        parts = swap.receive(swap.message)
        if swap.wire_dtype is not None:
            torch.cat([*parts, swap.remote_values[:0]], out=swap.remote_values)
        ctx.swap, ctx.scale = swap, gradient_scale
        return swap.requested.detach()  # or the tensor and this node would refer to each other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        swap, scale, grad = ctx.swap, ctx.scale, grads[0].contiguous()
        ctx.swap = None  # the graph may outlive the step, but not the memory of its rows
        swap.on_gradient(grad)
        to_others, own_grad = grad.split_with_sizes(
            [swap.remote_values.numel(), swap.num_requested[-1]]
        )
        message = swap.send(to_others, swap.num_requested, swap.num_sent, scale=scale)
        swap.update([*swap.receive(message, scale), own_grad])
        return None, None, None
