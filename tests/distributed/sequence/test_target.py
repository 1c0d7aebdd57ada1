"""Attention of rows to events in slices on several ranks against plain attention, in float64.

Shape suffix: N rows"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.costs import target_bytes
from gmeta.distributed.sequence.sharding import shard_sequences
from gmeta.distributed.sequence.target import target_attention
from tests.distributed.harness import on_ranks
from tests.distributed.sequence.messages import counted_messages

TASKS, HEADS, WIDTH, PLACES = 4, 3, 5, 240
# In no order, a task with a single row, one with none; rows that see nothing, or all.
TASK_N = torch.tensor([2, 0, 0, 3, 2, 0, 2, 2, 0, 2, 2])
BEFORE_N = torch.tensor([7, 0, PLACES, 61, 200, 59, 0, 1, 120, 180, 33])
MOST_ROWS = 6


def inputs(places: int) -> list[Tensor]:
    """The rows' queries, keys and values of whole sequences, and weights of the output by rank."""
    torch.manual_seed(0)
    query, weights = torch.randn(5, len(TASK_N), HEADS, WIDTH, dtype=torch.float64).tensor_split(
        [1]
    )
    key, value = 3 * torch.randn(2, TASKS, HEADS, places, WIDTH, dtype=torch.float64)
    return [query[0], key, value, weights]


def attend_on_rank(ranks: Ranks) -> list[Any]:
    slices, results = shard_sequences("ring", HEADS, ranks).slices, []
    for places in (PLACES, 4 * PLACES):
        query, key, value, weights = inputs(places)
        own = [one.chunk(slices.size, dim=2)[slices.rank].clone() for one in (key, value)]
        leaves = [one.requires_grad_() for one in (query, *own)]
        with counted_messages() as sent:
            output = target_attention(*leaves, TASK_N, BEFORE_N, slices)
            forward = sent.take()
            # Each rank's loss uses the same rows in another way.
            grads = torch.autograd.grad((output * weights[slices.rank]).sum(), leaves)
        results.append(([output.detach(), *grads], (forward, sent.take())))
    return results


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("nhd,nhld->nhl", query, key[TASK_N]) / math.sqrt(WIDTH)
    hidden = torch.arange(key.shape[2]) >= BEFORE_N[:, None, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(2).nan_to_num(0.0)
    return torch.einsum("nhl,nhld->nhd", weights, value[TASK_N])


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_attend_to_slices_as_to_whole_sequences(world_size: int) -> None:
    by_places = list(zip(*on_ranks(world_size, attend_on_rank), strict=True))
    for places, by_rank in zip((PLACES, 4 * PLACES), by_places, strict=True):
        *leaves, weights = inputs(places)
        leaves = [one.requires_grad_() for one in leaves]
        output = plain(*leaves)
        total = (output * weights[:world_size].sum(0)).sum()
        expected_query, *expected = torch.autograd.grad(total, leaves)
        for (ours, *_), _ in by_rank:
            assert (ours - output).abs().max() <= 1e-10
            assert not ours[BEFORE_N == 0].any()
        grad_query = sum(found[1] for found, _ in by_rank)
        assert (grad_query - expected_query).abs().max() <= 1e-10
        for index, grad in enumerate(expected, 2):
            ours = torch.cat([found[index] for found, _ in by_rank], dim=2)
            assert (ours - grad).abs().max() <= 1e-10
    sent = [[sent for _, sent in by_rank] for by_rank in by_places]
    # However long the sequences are; the gradient's AllReduce is of the outputs alone.
    assert sent[0] == sent[1]
    rows = TASKS * MOST_ROWS
    backward = 2 * rows * HEADS * WIDTH * 8 * (world_size - 1) // world_size
    forward = target_bytes(rows, HEADS, WIDTH, world_size, 8)
    assert sent[0] == [(forward, backward)] * world_size


@pytest.mark.distributed
def test_no_rows_are_attended_by_none() -> None:
    for shape, grads in on_ranks(2, attend_without_rows):
        assert shape == (0, HEADS, WIDTH)
        assert grads == 0


def attend_without_rows(ranks: Ranks) -> tuple[tuple[int, ...], float]:
    slices = shard_sequences("ring", HEADS, ranks).slices
    key = torch.ones(TASKS, HEADS, 6, WIDTH, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    output = target_attention(torch.zeros(0, HEADS, WIDTH), key, key, none, none, slices)
    output.sum().backward()
    assert key.grad is not None
    return tuple(output.shape), key.grad.abs().sum().item()
