"""Messages between ranks that share a sequence: AlltoAll, blocks passed along the line of ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Exchange = Callable[[Tensor], Tensor]


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
    back = partial(_all_to_all, peers, receive, send)
    return _communicate(values, partial(_all_to_all, peers, send, receive), back)


def _all_to_all(
    peers: Peers, send: Sequence[int], receive: Sequence[int], values: Tensor
) -> Tensor:
    received = values.new_empty(sum(receive) if receive else len(values), *values.shape[1:])
    sent = values.contiguous()
    dist.all_to_all_single(received, sent, list(receive), list(send), group=peers.group)
    return received


def add_over(values: Tensor, peers: Peers) -> Tensor:
    """Return the sum of all ranks' values, on every rank; differentiable."""
    add = partial(_all_reduce, peers)
    return values if peers.size == 1 else _communicate(values, add, add)


def _all_reduce(peers: Peers, values: Tensor) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=peers.group)
    return total


def sum_before(values: Tensor, peers: Peers) -> Tensor:
    """Return the sum of the values of the ranks before this one; differentiable. Each rank sends
    one message of the size of its values, at most."""
    return _communicate(values, partial(_sum_along, peers, 1), partial(_sum_along, peers, -1))


def _sum_along(peers: Peers, step: int, values: Tensor) -> Tensor:
    total = torch.zeros_like(values, memory_format=torch.contiguous_format)
    if peers.rank - step in peers:
        wait_for(peers.exchange(receive=[(total, peers.rank - step)]))
    if peers.rank + step in peers:
        wait_for(peers.exchange(send=[(total + values, peers.rank + step)]))
    return total


def _communicate(values: Tensor, there: Exchange, back: Exchange) -> Tensor:
    """Return what comes of a linear exchange; its transpose carries the gradients back."""
    result: Tensor = _Communicate.apply(values, there, back)
    return result


class _Communicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None
