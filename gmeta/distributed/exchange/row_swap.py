"""Rows on their way from the ranks that hold them, and their gradients on the way back: one
AlltoAll each way. Among ranks the others stand in order, then this one.

Shape suffixes: N rows, D embedding width, W ranks or workers, G groups of tables"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.distributed.groups.copies import TouchedRows
from gmeta.distributed.tables.rows_to_send import RowsToSend
from gmeta.distributed.tables.updates import FastGroup
from gmeta.distributed.transport.narrow_transport import NarrowTransport
from gmeta.distributed.transport.transport import Swap


class RowSwap:
    """One step, as one rank sees it: rows are looked up and on their way once it is made.

    `to_send_G` are the rows of each group that this rank sends, rank by rank, `counts_WG` how many
    of them go to each; `num_requested` the values that it requests of each. `touched` has what
    other groups of ranks bring for these rows; None: nothing. A gradient is the mean over
    `num_ranks`."""

    def __init__(
        self,
        wire: NarrowTransport,
        groups: Sequence[FastGroup],
        device: torch.device,
        to_send_G: Sequence[RowsToSend],
        counts_WG: Sequence[Sequence[int]],
        num_requested: Sequence[int],
        on_gradient: Callable[[Tensor], None],
        num_ranks: int,
        touched: TouchedRows | None,
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
        self.wire, self.on_gradient = wire, on_gradient
        self._device, self._num_ranks, self._touched = device, num_ranks, touched
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
        counts = send_counts[:-1], receive_counts[:-1]
        return self.wire.send(values, *counts, remote_values, scale)

    def update(self, grad_W: list[Tensor], scale: float) -> None:
        """Pass the groups the gradients of the rows that they sent to each rank, flat."""
        parts_WG = [
            values.split_with_sizes(sizes_G)
            for values, sizes_G in zip(grad_W, self.sizes_WG, strict=True)
        ]
        grads_G = []
        for index, group in enumerate(self.groups):
            parts_W = [parts_G[index] for parts_G in parts_WG]
            # As data-parallel averaging divides the layers' gradients; one rank's are the mean.
            mean = parts_W[0] if self._num_ranks == 1 else torch.cat(parts_W).div_(self._num_ranks)
            grads_G.append(mean.view(-1, group.width))
        to_update_G: Sequence[RowsToSend] = self.to_send_G
        if self._touched is not None:
            to_update_G, grads_G = self._touched.add_up(to_update_G, grads_G, scale)
        for group, to_update, grad_ND in zip(self.groups, to_update_G, grads_G, strict=True):
            group.take(to_update, grad_ND)

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
        parts = swap.wire.receive(swap.message)
        if swap.wire.dtype is not None:
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
        swap.update([*swap.wire.receive(message, scale), own_grad], scale)
        return None, None, None
