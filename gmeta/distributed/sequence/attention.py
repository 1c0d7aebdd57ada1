"""Exact attention over slices of sequences: Ulysses (arXiv 2309.14509), ring (arXiv 2310.01889)
and both (USP, arXiv 2405.07719), for softmax and for HSTU's pointwise attention.

Queries, keys and values have the shape [tasks, heads, places, width]. A rank has the same number of
places of every sequence, in the order of ranks; what is beyond a task's length is padding.

Forward, keys and values travel to the ranks behind, which alone see them: half of what a closed
ring would send. Backward, queries and the gradients of their outputs travel to the ranks before,
and gather the queries' gradient on the way; those of keys and values stay where they are.

Shape suffix: T tasks"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.distributed.sequence.peers import Peers, swap, wait_for
from gmeta.distributed.sequence.sharding import SequenceSharding
from gmeta.distributed.sequence.tiles import (
    KeyLimits,
    Pointwise,
    RelativeBias,
    Softmax,
    Tile,
    flatten_heads,
    queries_with_gradient,
)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, length_T: Tensor, sharding: SequenceSharding
) -> Tensor:
    """Return the softmax attention of this rank's places to all places up to themselves, in the
    shape of `query`; 0 for a place that sees none.

    Args:
        length_T: how many places of each whole sequence are events; on the host."""
    parts = [_all_places(one, sharding.heads) for one in (query, key, value)]
    attended: Tensor = _RingAttention.apply(*parts, None, None, _Line(sharding.ring, length_T))
    return _all_heads(attended, sharding.heads)


def pointwise_attention(
    query: Tensor, key: Tensor, value: Tensor, length_T: Tensor, bias: RelativeBias,
    sharding: SequenceSharding,
) -> Tensor:  # fmt: skip
    """Return HSTU's attention, silu(q k^T + bias) v, of this rank's places to all places up to
    themselves, divided by how many those are; in the shape of `query`.

    Args:
        length_T: how many places of each whole sequence are events; on the host.
        bias: with the times of all places, on every rank."""
    heads, places, first = sharding.heads, query.shape[2], sharding.first(query.shape[2])
    parts = [_all_places(one, heads) for one in (query, key, value)]
    tables = [one if len(one) == 1 else one.chunk(heads.size)[heads.rank] for one in bias[:2]]
    line = _Line(sharding.ring, length_T, bias)
    attended = _all_heads(_RingAttention.apply(*parts, *tables, line), heads)
    count = torch.arange(first + 1, first + places + 1, device=query.device).to(query.dtype)
    return attended / count.unsqueeze(1)


def _all_places(tensor: Tensor, peers: Peers) -> Tensor:
    """Return some heads of all places of these ranks, for all heads of this rank's places."""
    if peers.size == 1:
        return tensor
    received = swap(tensor.unflatten(1, (peers.size, -1)).movedim(1, 0), peers)
    return received.movedim(0, 2).flatten(2, 3)  # [tasks, heads, ranks x places, width]


def _all_heads(attended: Tensor, peers: Peers) -> Tensor:
    """Return all heads of this rank's places, for some heads of all places."""
    if peers.size == 1:
        return attended
    received = swap(attended.unflatten(2, (peers.size, -1)).movedim(2, 0), peers)
    return received.movedim(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class _Line:
    """The ranks that pass on blocks, and what they attend by."""

    peers: Peers
    length_T: Tensor
    bias: RelativeBias | None = None

    def attention(self, position: Tensor | None, time: Tensor | None) -> Softmax | Pointwise:
        if self.bias is None or position is None or time is None:
            return Softmax()
        return Pointwise(self.bias._replace(position=position, time=time))

    def tiles(self, key: Tensor, of_query: int, of_key: int) -> Iterator[Tile]:
        """Yield those of queries of one rank and keys of another."""
        places = key.shape[1]
        limits = KeyLimits.causal(self.length_T, of_query * places, places, key.device)
        return limits.tiles(key, of_key * places)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, position: Tensor | None,
        time: Tensor | None, line: _Line,
    ) -> Tensor:  # fmt: skip
        queries, keys, values = (flatten_heads(one) for one in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            attention = line.attention(position, time)
            sums = attention.begin(queries)
            for source, block in line.peers.pass_on([keys, values], 1):
                attention.add(sums, queries, block, line.tiles(keys, line.peers.rank, source))
            outputs = attention.finish(sums)
        ctx.line = line
        needed = outputs if isinstance(attention, Softmax) else ()
        ctx.save_for_backward(queries, keys, values, position, time, *needed)
        return outputs[0].view(query.shape).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, position, time, *outputs = ctx.saved_tensors
        attention = ctx.line.attention(position, time)
        with torch.autocast(query.device.type, enabled=False):
            of_queries = queries_with_gradient(query, flatten_heads(grads[0]), outputs)
            found = _gradients(attention, of_queries, [key, value], ctx.line)
        tables = attention.grad_tables if isinstance(attention, Pointwise) else (None, None)
        return *(grad.view(grads[0].shape) for grad in found), *tables, None


def _gradients(
    attention: Softmax | Pointwise, of_queries: list[Tensor], own: list[Tensor], line: _Line
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value; `own` are this rank's keys and values."""
    rank, peers = line.peers.rank, line.peers
    grad_query, grad_key, grad_value = (torch.zeros_like(one) for one in (own[0], *own))
    # A step's queries are those of the rank that many places behind; `partial` is their gradient.
    blocks, partial, home = peers.pass_on(of_queries, -1), grad_query, None
    for step in range(peers.size):
        send, receive = [], []
        if (met := next(blocks, None)) is not None:
            source, block = met
            tiles = line.tiles(own[0], source, rank)
            attention.add_gradients(block, own, tiles, (partial, grad_key, grad_value))
            if step:  # on to the next rank before, from the first one home
                send.append((partial, rank - 1 if rank else source))
        if rank + 1 + step in peers:
            partial = torch.zeros_like(grad_query)
            # The rank behind was the first to meet them, unless they are its own.
            receive += [(partial, rank + 1)] if step else []
        if step and step == rank:
            home = torch.empty_like(grad_query)
            receive.append((home, 0))
        wait_for(peers.exchange(send, receive))
    return grad_query if home is None else grad_query.add_(home), grad_key, grad_value
