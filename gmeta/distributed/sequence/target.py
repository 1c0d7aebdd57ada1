"""Attention of rows to their task's events before them, which lie in slices on several ranks: each
attends to its own slice, and what is merged does not depend on how long the sequence is."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.distributed.sequence.peers import Peers, add_over
from gmeta.distributed.sequence.tiles import (
    KeyLimits,
    Softmax,
    flatten_heads,
    queries_with_gradient,
)


def target_attention(
    query: Tensor, key: Tensor, value: Tensor, before: Tensor, slices: Peers
) -> Tensor:
    """Return the softmax attention of every row in the shape of `query`, the same on all ranks; 0
    for a row without events before it. All ranks have the same rows.

    Args:
        query: [tasks, heads, rows of a task, width].
        key, value: this rank's slice, [tasks, heads, places, width]; on all ranks of equal shapes.
        before: how many events of its task a row sees, the first ones, [tasks, rows]; on the host.
    """
    limits = KeyLimits(before, before.to(query.device, non_blocking=True))
    attended: Tensor = _PartialSoftmax.apply(query, key, value, limits, slices)
    return attended


class _PartialSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, limits: KeyLimits, slices: Peers
    ) -> Tensor:
        attention, queries, *block = (
            Softmax(),
            *(flatten_heads(one) for one in (query, key, value)),
        )
        with torch.autocast(query.device.type, enabled=False):
            sums = attention.begin(queries)
            tiles = limits.tiles(block[0], slices.rank * key.shape[2])
            attention.add(sums, queries, block, tiles)
            outputs = _merge(attention.finish(sums), slices)
        ctx.limits, ctx.slices, ctx.shapes = limits, slices, (query.shape, key.shape, key.shape)
        ctx.save_for_backward(queries, *block, *outputs)
        return outputs[0].view(query.shape).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *outputs = ctx.saved_tensors
        # Every rank's loss may use every row.
        grad_output = add_over(flatten_heads(grads[0]), ctx.slices)
        found = [torch.zeros_like(one) for one in (query, key, value)]
        with torch.autocast(query.device.type, enabled=False):
            of_queries = queries_with_gradient(query, grad_output, outputs)
            tiles = ctx.limits.tiles(key, ctx.slices.rank * key.shape[1])
            Softmax().add_gradients(of_queries, [key, value], tiles, found)
        return *(grad.view(s) for grad, s in zip(found, ctx.shapes, strict=True)), None, None


def _merge(of_slice: list[Tensor], slices: Peers) -> list[Tensor]:
    """Return output and logarithm of the total of all slices, for those of this rank's slice. A
    rank sends as much as one AllReduce of output and total would."""
    if slices.size == 1:
        return of_slice
    # A sum over ranks would first need the largest score of them all, by an AllReduce of its own.
    # Exponentials that keep their logarithms can be added without, but no backend reduces by that:
    # so these are the two halves of an AllReduce, and the addition stands between them.
    packed = torch.cat(of_slice, dim=2).flatten(0, 1)
    padded = packed.new_zeros(-(-len(packed) // slices.size) * slices.size, packed.shape[1])
    padded[: len(packed)] = packed
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=slices.group)
    outputs, log_totals = torch.stack(parts.chunk(slices.size)).tensor_split([-1], dim=2)
    total = log_totals.logsumexp(0)
    # -inf - -inf would be NaN where no rank has a key.
    weights = (log_totals - total.clamp_min(torch.finfo(total.dtype).min)).exp()
    merged = torch.cat([(weights * outputs).sum(0), total], dim=1)
    dist.all_gather_into_tensor(padded, merged, group=slices.group)
    whole = padded[: len(packed)].unflatten(0, of_slice[0].shape[:2])
    return [one.contiguous() for one in whole.tensor_split([-1], dim=2)]
