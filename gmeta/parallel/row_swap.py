"""Rows on their way from the ranks that hold them, and their gradients on the way back: one
AlltoAll each way.

Rows are looked up where the message that takes them away begins, and updated from where the ones
that bring their gradients end: in between only the transport moves them.

Shape suffixes: N rows, D embedding width, W ranks, G groups of tables.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.parallel.transport import Swap, Transport
from gmeta.table_updates import FastGroup, GivenRows

FLOAT16_MAX = 65_504.0


@dataclass(frozen=True)
class RowSwap:
    """One step, as one rank sees it. By peer: the other ranks in order, itself last."""

    transport: Transport
    groups: Sequence[FastGroup]
    wire_dtype: torch.dtype | None  # None: as they are
    row_WG: list[list[Tensor]]  # that this rank gives, by their numbers within the group
    num_given: list[int]  # values
    num_asked: list[int]
    gradient_scale: float  # to the middle of float16's range

    def values(self) -> Tensor:
        """All that this rank asks for, flat, peer by peer; differentiable, into the tables."""
        # Where this rank holds no table, backward must join the AlltoAll nevertheless.
        roots = [group.weights for group in self.groups] or [torch.zeros(0, requires_grad=True)]
        asked: Tensor = _Swapped.apply(self, *roots)
        return asked

    def outgoing(self) -> Tensor:
        """Memory for what the other ranks ask for."""
        num_values = sum(self.num_given[:-1])
        if self.wire_dtype is not None:
            return torch.empty(num_values)
        return self.transport.outgoing(num_values, torch.float32)

    def send(
        self, values: Tensor, given: list[int], asked: list[int], taken: Tensor | None = None
    ) -> Swap:
        """Give the others so many values each; in float32 theirs go to `taken` if it is there."""
        if self.wire_dtype is None:
            return self.transport.swap(values, given[:-1], asked[:-1], taken)
        if self.wire_dtype == torch.float16:
            values = values.clamp(-FLOAT16_MAX, FLOAT16_MAX)
        # gloo does not know bfloat16: its bits travel as float16.
        travelling = self.transport.outgoing(values.numel(), torch.float16)
        travelling.view(self.wire_dtype).copy_(values)
        return self.transport.swap(travelling, given[:-1], asked[:-1])

    def received(self, swap: Swap) -> list[Tensor]:
        """What the others gave, in float32."""
        parts = swap.parts()
        return (
            parts if self.wire_dtype is None else [x.view(self.wire_dtype).float() for x in parts]
        )

    def rows_WG(self, values_W: Iterable[Tensor]) -> list[list[Tensor]]:
        """Values that this rank gives these peers, or their gradients, as rows [N, D]."""
        widths = [group.width for group in self.groups]
        found = []
        for values, row_G in zip(values_W, self.row_WG, strict=False):
            sizes = [row_N.numel() * width for row_N, width in zip(row_G, widths, strict=True)]
            cut = zip(values.split(sizes), widths, strict=True)
            found.append([part.view(-1, width) for part, width in cut])
        return found

    def look_up(self, row_WG: list[list[Tensor]], rows_WG: list[list[Tensor]]) -> None:
        """Copy rows to where they are asked for."""
        for row_G, rows_G in zip(row_WG, rows_WG, strict=True):
            for group, row_N, rows_ND in zip(self.groups, row_G, rows_G, strict=True):
                group.look_up(row_N, rows_ND)


class _Swapped(torch.autograd.Function):
    """Backward takes the gradients to the owners of the rows, which update them: for each row they
    count one over the number of ranks, as data-parallel averaging divides those of the layers.
    """

    @staticmethod
    def forward(ctx: Any, swap: RowSwap, *_: Tensor) -> Tensor:
        asked = torch.empty(sum(swap.num_asked))
        taken, own = asked.split([sum(swap.num_asked[:-1]), swap.num_asked[-1]])
        given = swap.outgoing()
        rows_WG = swap.rows_WG([*given.split(swap.num_given[:-1]), own])
        swap.look_up(swap.row_WG[:-1], rows_WG[:-1])
        message = swap.send(given, swap.num_given, swap.num_asked, taken)
        swap.look_up(swap.row_WG[-1:], rows_WG[-1:])
        parts = swap.received(message)
        if swap.wire_dtype is not None:
            torch.cat([*parts, taken[:0]], out=taken)
        ctx.swap, ctx.message, ctx.given = swap, message, given
        ctx.versions = [group.weights._version for group in swap.groups]
        ctx.save_for_backward(asked)
        return asked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (asked,), swap = ctx.saved_tensors, ctx.swap
        cut = [sum(swap.num_asked[:-1]), swap.num_asked[-1]]
        to_others, own_grad = grads[0].contiguous().split(cut)
        scale = swap.gradient_scale if swap.wire_dtype == torch.float16 else 1.0
        if scale != 1.0:
            to_others = to_others * scale
        message = swap.send(to_others, swap.num_asked, swap.num_given)
        grad_W = [part if scale == 1.0 else part / scale for part in swap.received(message)]
        values_W = [*ctx.given.split(swap.num_given[:-1]), asked[cut[0] :]]
        rows_WG, grads_WG = swap.rows_WG(values_W), swap.rows_WG([*grad_W, own_grad])
        memory = ctx.message, message
        ctx.message = ctx.given = None  # the graph may outlive the step
        for index, (group, version) in enumerate(zip(swap.groups, ctx.versions, strict=True)):
            by_peer = zip(swap.row_WG, rows_WG, grads_WG, strict=True)
            parts = [(row[index], rows[index], grad[index]) for row, rows, grad in by_peer]
            group.take(
                [
                    GivenRows(row_N, rows_ND, grad_ND, version, memory)
                    for row_N, rows_ND, grad_ND in parts
                ],
                1 / len(swap.row_WG),
            )
        return None, *(None for _ in ctx.needs_input_grad[1:])
