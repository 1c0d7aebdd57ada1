"""Rows on their way from the ranks that hold them, and their gradients on the way back: one
AlltoAll each way.

Shape suffixes: N rows, D embedding width, W ranks: the others in order, then this one; G groups of
tables.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.parallel.transport.transport import Swap, Transport
from gmeta.tables.updates import FastGroup

FLOAT16_MAX = 65_504.0


class RowSwap:
    """One step, as one rank sees it: rows are looked up and on their way once it is made.

    `row_WG` are the rows that this rank gives to each rank, by their numbers within each group;
    `num_given` and `num_asked` the values that it gives to each and asks of each; `saw_gradient` is
    called with the gradient of all it asked for.
    """

    def __init__(
        self,
        transport: Transport,
        groups: Sequence[FastGroup],
        wire_dtype: torch.dtype | None,
        row_WG: list[list[Tensor]],
        num_given: list[int],
        num_asked: list[int],
        saw_gradient: Callable[[Tensor], None],
    ) -> None:
        self.groups, self.row_WG = groups, row_WG
        self.wire_dtype = wire_dtype  # None: as they are
        self.num_given, self.num_asked = num_given, num_asked
        self.saw_gradient = saw_gradient
        self._transport = transport
        self.asked = torch.empty(sum(num_asked))
        self.taken, own = self.asked.split_with_sizes([sum(num_asked[:-1]), num_asked[-1]])
        num_remote = sum(num_given[:-1])
        if wire_dtype is None:
            given = transport.outgoing(num_remote, torch.float32)
        else:
            given = torch.empty(num_remote)
        to_others = zip(given.split_with_sizes(num_given[:-1]), row_WG[:-1], strict=True)
        for values, row_G in to_others:
            self._look_up(row_G, values)
        self.message = self.send(given, num_given, num_asked, self.taken)
        # This rank's own rows are looked up while those of the others travel.
        self._look_up(row_WG[-1], own)

    def values(self, gradient_scale: float) -> Tensor:
        """Return all that this rank asks for, flat, rank by rank; backward leads into the tables.

        `gradient_scale` brings gradients to the middle of float16's range.
        """
        # Where this rank holds no table, backward must join the AlltoAll nevertheless.
        weights = [group.weights for group in self.groups]
        roots = weights or [torch.zeros(0, requires_grad=True)]
        asked: Tensor = _Swapped.apply(self, gradient_scale, *roots)
        return asked

    def send(
        self,
        values: Tensor,
        given: list[int],
        asked: list[int],
        taken: Tensor | None = None,
        scale: float = 1.0,
    ) -> Swap:
        """Start to give the others so many values each, in float16 `scale` times; in float32 theirs
        go to `taken` if it is there.
        """
        if self.wire_dtype is not None:
            if self.wire_dtype == torch.float16:
                values = (values * scale).clamp_(-FLOAT16_MAX, FLOAT16_MAX)
            # gloo does not know bfloat16: its bits travel as float16.
            travelling = self._transport.outgoing(values.numel(), torch.float16)
            travelling.view(self.wire_dtype).copy_(values)
            values, taken = travelling, None
        return self._transport.swap(values, given[:-1], asked[:-1], taken)

    def received(self, swap: Swap, scale: float = 1.0) -> list[Tensor]:
        """Wait for what the others gave, `scale` times in float16; return it in float32, rank by
        rank.
        """
        parts = swap.parts()
        if self.wire_dtype is None:
            return parts
        unscaled = 1 / scale if self.wire_dtype == torch.float16 else 1.0
        return [part.view(self.wire_dtype).float().mul_(unscaled) for part in parts]

    def rows_G(self, values: Tensor, row_G: list[Tensor]) -> list[Tensor]:
        """Return the flat values of these rows as [N, D] of each group."""
        widths = [group.width for group in self.groups]
        sizes = [row_N.numel() * width for row_N, width in zip(row_G, widths, strict=True)]
        cut = zip(values.split_with_sizes(sizes), widths, strict=True)
        return [part.view(-1, width) for part, width in cut]

    def _look_up(self, row_G: list[Tensor], values: Tensor) -> None:
        """Copy rows to where they are asked for."""
        rows_G = self.rows_G(values, row_G)
        for group, row_N, rows_ND in zip(self.groups, row_G, rows_G, strict=True):
            group.look_up(row_N, rows_ND)


class _Swapped(torch.autograd.Function):
    """Backward takes the gradients to the owners of the rows, which update them; each row's
    gradient is divided by the number of ranks, as data-parallel averaging divides the layers'.
    """

    @staticmethod
    def forward(ctx: Any, swap: RowSwap, gradient_scale: float, *_: Tensor) -> Tensor:
        parts = swap.received(swap.message)
        if swap.wire_dtype is not None:
            torch.cat([*parts, swap.taken[:0]], out=swap.taken)
        ctx.swap, ctx.scale = swap, gradient_scale
        return swap.asked.detach()  # itself it would lead to this node, and the node to it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        swap, scale, grad = ctx.swap, ctx.scale, grads[0].contiguous()
        ctx.swap = None  # the graph may outlive the step, but not the memory of its rows
        swap.saw_gradient(grad)
        to_others, own_grad = grad.split_with_sizes([swap.taken.numel(), swap.num_asked[-1]])
        message = swap.send(to_others, swap.num_asked, swap.num_given, scale=scale)
        grad_W = [*swap.received(message, scale), own_grad]
        grad_WG = [swap.rows_G(*of_rank) for of_rank in zip(grad_W, swap.row_WG, strict=True)]
        for index, group in enumerate(swap.groups):
            row_N = torch.cat([row_G[index] for row_G in swap.row_WG])
            grad_ND = torch.cat([grad_G[index] for grad_G in grad_WG])
            group.take(row_N, grad_ND.div_(len(grad_W)))
        return None, None, *(None for _ in ctx.needs_input_grad[2:])
