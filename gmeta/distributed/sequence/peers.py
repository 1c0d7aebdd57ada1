"""Messages between ranks that share a sequence: AlltoAll, blocks passed along the line of ranks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@final
class Peers:
    """Ranks in a line, and the place of this one; a single rank without a group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()

    def __contains__(self, rank: int) -> bool:
        return 0 <= rank < self.size

    def exchange(
        self, send: Iterable[tuple[Tensor, int]] = (), receive: Iterable[tuple[Tensor, int]] = ()
    ) -> list[dist.Work]:
        """Start to send and to receive tensors, each to or from a rank, and return what to wait
        for. On both sides messages between two ranks come in the same order."""
        moves: list[tuple[Any, Tensor, int]] = [(dist.isend, *one) for one in send]
        moves += [(dist.irecv, *one) for one in receive]
        group = self.group
        messages = [dist.P2POp(op, one, None, group, group_peer=peer) for op, one, peer in moves]
        return dist.batch_isend_irecv(messages) if messages else []

    def pass_on(self, tensors: list[Tensor], step: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield a rank and its tensors: this one's, then those of the ranks before it, from the
        nearest on (step = 1), or of those behind it (-1). All ranks have tensors of equal shapes.

        The next ones travel while the caller works on those that it has."""
        source = self.rank
        while True:
            origin = source - step
            sent = tensors if self.rank + step in self else []
            incoming = [torch.empty_like(one) for one in tensors] if origin in self else []
            work = self.exchange(
                [(one, self.rank + step) for one in sent],
                [(one, self.rank - step) for one in incoming],
            )
            yield source, tensors
            wait_for(work)
            if not incoming:
                return
            tensors, source = incoming, origin


def wait_for(work: Iterable[dist.Work]) -> None:
    """Wait for messages."""
    for one in work:
        one.wait()


def swap(
    values: Tensor, peers: Peers, send: Sequence[int] = (), receive: Sequence[int] = ()
) -> Tensor:
    """Send each rank so many entries of the first axis, equally many if not given, and return those
    received, in the order of ranks; differentiable."""
    if peers.size == 1:
        return values
    swapped: Tensor = _Swap.apply(values, peers, send, receive)
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, peers: Peers, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        ctx.peers, ctx.counts = peers, (receive, send)
        received = values.new_empty(sum(receive) if receive else len(values), *values.shape[1:])
        group, contiguous = peers.group, values.contiguous()
        dist.all_to_all_single(received, contiguous, list(receive), list(send), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Swap.apply(grads[0], ctx.peers, *ctx.counts), None, None, None


def sum_before(values: Tensor, peers: Peers) -> Tensor:
    """Return the sum of the values of the ranks before this one; differentiable. Each rank sends
    one message of the size of its values, at most."""
    if peers.size == 1:
        return torch.zeros_like(values)
    total: Tensor = _SumBefore.apply(values, peers, 1)
    return total


class _SumBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, peers: Peers, step: int) -> Tensor:
        ctx.peers, ctx.step = peers, step
        total = torch.zeros_like(values, memory_format=torch.contiguous_format)
        if peers.rank - step in peers:
            wait_for(peers.exchange(receive=[(total, peers.rank - step)]))
        if peers.rank + step in peers:
            wait_for(peers.exchange(send=[(total + values, peers.rank + step)]))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _SumBefore.apply(grads[0], ctx.peers, -ctx.step), None, None
