"""Rows on their way from the ranks that hold them, and their gradients on the way back: one
AlltoAll each way.

Rows are looked up where the message that takes them away begins, and updated from where the ones
that bring their gradients end: in between only the transport moves them.

Shape suffixes: N rows, D embedding width, W ranks, G groups of tables.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.parallel.transport import Swap, Transport
from gmeta.tables.repeated_rows import ascend
from gmeta.tables.updates import FastGroup, GivenRows

FLOAT16_MAX = 65_504.0


class Learning(NamedTuple):
    """The rows whose gradients travel back: they are the first of each peer's, in groups of their
    own.
    """

    num_groups: int
    num_given: list[int]  # values, by peer
    num_asked: list[int]


class RowSwap:
    """One step, as one rank sees it: rows are looked up and on their way once it is made.

    By peer, these being the other ranks in order, itself last: the rows that this rank gives, by
    their numbers within each group, and how many values it gives and asks for; `saw_gradient` is
    given that of all it asked for.
    """

    def __init__(
        self,
        transport: Transport,
        groups: Sequence[FastGroup],
        wire_dtype: torch.dtype | None,
        row_WG: list[list[Tensor]],
        num_given: list[int],
        num_asked: list[int],
        learning: Learning,
        saw_gradient: Callable[[Tensor], None],
    ) -> None:
        self.groups, self.row_WG, self.learning = groups, row_WG, learning
        self.learning_groups = groups[: learning.num_groups]
        self.wire_dtype = wire_dtype  # None: as they are
        self.num_given, self.num_asked = num_given, num_asked
        self.saw_gradient = saw_gradient
        self._transport = transport
        self.asked = torch.empty(sum(num_asked))
        self.taken, own = self.asked.split_with_sizes([sum(num_asked[:-1]), num_asked[-1]])
        num_remote = sum(num_given[:-1])
        if wire_dtype is None:
            self.given = transport.outgoing(num_remote, torch.float32)
        else:
            self.given = torch.empty(num_remote)
        # Torch's own `split` takes twice the time around this.
        values_W = [*self.given.split_with_sizes(num_given[:-1]), own]
        self.rows_WG = [self.rows_G(*of_peer) for of_peer in zip(values_W, row_WG, strict=True)]
        self._look_up(row_WG[:-1], self.rows_WG[:-1])
        self.message = self.send(self.given, num_given, num_asked, self.taken)
        self._look_up(row_WG[-1:], self.rows_WG[-1:])
        self.versions = [group.weights._version for group in self.learning_groups]

    def values(self, gradient_scale: float) -> Tensor:
        """All that this rank asks for, flat, peer by peer; differentiable, into the tables.
        `gradient_scale` brings gradients to the middle of float16's range.
        """
        # Where this rank holds no table, backward must join the AlltoAll nevertheless.
        weights = [group.weights for group in self.learning_groups]
        roots = weights or [torch.zeros(0, requires_grad=True)]
        asked: Tensor = _Swapped.apply(self, gradient_scale, *roots)
        return asked

    def send(
        self, values: Tensor, given: list[int], asked: list[int], taken: Tensor | None = None
    ) -> Swap:
        """Give the others so many values each; in float32 theirs go to `taken` if it is there."""
        if self.wire_dtype is not None:
            if self.wire_dtype == torch.float16:
                values = values.clamp(-FLOAT16_MAX, FLOAT16_MAX)
            # gloo does not know bfloat16: its bits travel as float16.
            travelling = self._transport.outgoing(values.numel(), torch.float16)
            travelling.view(self.wire_dtype).copy_(values)
            values, taken = travelling, None
        swap = self._transport.swap(values, given[:-1], asked[:-1], taken)
        self._transport.flush()
        return swap

    def received(self, swap: Swap) -> list[Tensor]:
        """What the others gave, in float32."""
        parts = swap.parts()
        if self.wire_dtype is None:
            return parts
        return [part.view(self.wire_dtype).float() for part in parts]

    def rows_G(self, values: Tensor, row_G: list[Tensor]) -> list[Tensor]:
        """Values that a peer asks for, or their gradients, as these rows [N, D] of the first
        groups.
        """
        widths = [group.width for group in self.groups[: len(row_G)]]
        sizes = [row_N.numel() * width for row_N, width in zip(row_G, widths, strict=True)]
        cut = zip(values.split_with_sizes(sizes), widths, strict=True)
        return [part.view(-1, width) for part, width in cut]

    def learning_parts(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Of the gradient of all values, what the others are sent, and what stays here."""
        num_asked = self.learning.num_asked
        if num_asked == self.num_asked:
            to_others, own = grad.split_with_sizes([self.taken.numel(), num_asked[-1]])
            return to_others, own
        sections = zip(grad.split_with_sizes(self.num_asked), num_asked, strict=True)
        *of_others, own = [section[:count] for section, count in sections]
        return of_others[0] if len(of_others) == 1 else torch.cat([grad[:0], *of_others]), own

    def _look_up(self, row_WG: list[list[Tensor]], rows_WG: list[list[Tensor]]) -> None:
        """Copy rows to where they are asked for."""
        for row_G, rows_G in zip(row_WG, rows_WG, strict=True):
            for group, row_N, rows_ND in zip(self.groups, row_G, rows_G, strict=True):
                group.look_up(row_N, rows_ND)


class _Swapped(torch.autograd.Function):
    """Backward takes the gradients to the owners of the rows, which update them: for each row they
    count one over the number of ranks, as data-parallel averaging divides those of the layers.
    """

    @staticmethod
    def forward(ctx: Any, swap: RowSwap, gradient_scale: float, *_: Tensor) -> Tensor:
        parts = swap.received(swap.message)
        if swap.wire_dtype is not None:
            torch.cat([*parts, swap.taken[:0]], out=swap.taken)
        ctx.swap, ctx.scale = swap, gradient_scale if swap.wire_dtype == torch.float16 else 1.0
        ctx.save_for_backward(swap.asked)
        return swap.asked.detach()  # itself it would lead to this node, and the node to it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        _, swap, scale = ctx.saved_tensors, ctx.swap, ctx.scale  # raises if the rows were changed
        ctx.swap = None  # the graph may outlive the step, but not what the rows lie in
        swap.saw_gradient(grads[0])
        learning = swap.learning
        to_others, own_grad = swap.learning_parts(grads[0].contiguous())
        if scale != 1.0:
            to_others = to_others * scale
        message = swap.send(to_others, learning.num_asked, learning.num_given)
        rows_WG = swap.rows_WG
        returned, memory = _Gradients(swap, message, own_grad, scale), (swap.message, message)
        own = len(rows_WG) - 1
        groups = zip(swap.learning_groups, swap.versions, strict=True)
        for index, (group, version) in enumerate(groups):
            # Its own rows first: the gradients of the others arrive meanwhile.
            parts = [
                GivenRows(
                    swap.row_WG[peer][index],
                    rows_WG[peer][index],
                    partial(returned.of, peer, index),
                    ascend(swap.row_WG[peer][index].numpy()),
                    version,
                    memory,
                )
                for peer in (own, *range(own))
            ]
            group.take(parts, 1 / len(rows_WG))
        return None, None, *(None for _ in ctx.needs_input_grad[2:])


class _Gradients:
    """Of the rows that a rank gave: waits for those of other ranks when the first is asked for."""

    def __init__(self, swap: RowSwap, message: Swap, own_grad: Tensor, scale: float) -> None:
        self._swap = swap
        self._message = message
        self._own_grad = own_grad
        self._scale = scale  # of those that travelled

    def of(self, peer: int, group: int) -> Tensor:
        """[N, D], by peers as RowSwap has them."""
        is_own = peer + 1 == len(self._swap.row_WG)
        return (self._own_G if is_own else self._of_others_WG[peer])[group]

    @cached_property
    def _own_G(self) -> list[Tensor]:
        return self._rows_G(self._own_grad, self._swap.row_WG[-1])

    @cached_property
    def _of_others_WG(self) -> list[list[Tensor]]:
        parts = self._swap.received(self._message)
        grad_W = [part if self._scale == 1.0 else part / self._scale for part in parts]
        peers = zip(grad_W, self._swap.row_WG[:-1], strict=True)
        return [self._rows_G(*of_peer) for of_peer in peers]

    def _rows_G(self, grad: Tensor, row_G: list[Tensor]) -> list[Tensor]:
        return self._swap.rows_G(grad, row_G[: self._swap.learning.num_groups])
