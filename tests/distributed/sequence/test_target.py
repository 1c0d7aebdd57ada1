"""Attention of rows to events in slices on several ranks against plain attention, in float64."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.costs import target_bytes
from gmeta.distributed.sequence.encode import pool_over_ranks
from gmeta.distributed.sequence.peers import Peers, add_over
from gmeta.distributed.sequence.sharding import shard_sequences
from gmeta.distributed.sequence.target import target_attention
from tests.distributed.harness import on_ranks
from tests.distributed.sequence.messages import counted_messages

HEADS, WIDTH, PLACES = 3, 5, 240
# By task and row; rows that see nothing, or all, and a task whose rows see nothing.
BEFORE = torch.tensor([[7, 0, PLACES, 61, 200], [59, 0, 1, 120, 180], [0, 0, 0, 0, 0]])
TASKS, ROWS = BEFORE.shape
OWNERS = {1: [0, 0, 0], 2: [1, 1, 1], 4: [0, 0, 2]}


def inputs(places: int) -> list[Tensor]:
    """The rows' queries, keys and values of whole sequences, and weights of the output by rank."""
    torch.manual_seed(0)
    query = torch.randn(TASKS, HEADS, ROWS, WIDTH, dtype=torch.float64)
    key, value = 3 * torch.randn(2, TASKS, HEADS, places, WIDTH, dtype=torch.float64)
    return [query, key, value, torch.randn(4, *query.shape, dtype=torch.float64)]


def attend_on_rank(ranks: Ranks) -> list[Any]:
    slices, results = shard_sequences("ring", HEADS, ranks).slices, []
    for places in (PLACES, 4 * PLACES):
        query, key, value, weights = inputs(places)
        own = [one.chunk(slices.size, dim=2)[slices.rank].clone() for one in (key, value)]
        leaves = [one.requires_grad_() for one in (query, *own)]
        with counted_messages() as sent:
            output = target_attention(*leaves, BEFORE, slices)
            forward = sent.take()
            # Each rank's loss uses the same rows in another way.
            grads = torch.autograd.grad((output * weights[slices.rank]).sum(), leaves)
        results.append(([output.detach(), *grads], (forward, sent.take())))
    return results


def hidden(places: int) -> Tensor:
    """Events that a row does not know, [tasks, rows, places]."""
    return torch.arange(places) >= BEFORE.unsqueeze(2)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT / math.sqrt(WIDTH)
    scores = scores.masked_fill(hidden(key.shape[2]).unsqueeze(1), -math.inf)
    return scores.softmax(3).nan_to_num(0.0) @ value


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
            assert not ours.transpose(1, 2)[BEFORE == 0].any()
        grad_query = sum(found[1] for found, _ in by_rank)
        assert (grad_query - expected_query).abs().max() <= 1e-10
        for index, grad in enumerate(expected, 2):
            ours = torch.cat([found[index] for found, _ in by_rank], dim=2)
            assert (ours - grad).abs().max() <= 1e-10
    sent = [[sent for _, sent in by_rank] for by_rank in by_places]
    # However long the sequences are; the gradient's AllReduce is of the outputs alone.
    assert sent[0] == sent[1]
    backward = 2 * TASKS * ROWS * HEADS * WIDTH * 8 * (world_size - 1) // world_size
    forward = target_bytes(TASKS * ROWS, HEADS, WIDTH, world_size, 8)
    assert sent[0] == [(forward, backward)] * world_size


class Pool(nn.Module):
    """SIM's attention or DIN's sum over the events of a slice, by layers of this rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        width = HEADS * WIDTH
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).double()
        self.output, self.weight = nn.Linear(width, width).double(), nn.Linear(width, 1).double()

    def attend(self, slices: Peers, events: Tensor, targets: Tensor, before: Tensor) -> Tensor:
        of = zip(self.parts, (targets, events, events), strict=True)
        query, key, value = (
            layer(one).unflatten(2, (HEADS, WIDTH)).transpose(1, 2) for layer, one in of
        )
        attended = target_attention(query, key, value, before, slices)
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result

    def add(self, slices: Peers, events: Tensor, targets: Tensor, before: Tensor) -> Tensor:
        places = torch.arange(events.shape[1]) + slices.rank * events.shape[1]
        weights = self.weight((events.unsqueeze(1) * targets.unsqueeze(2)).relu()).squeeze(3)
        return add_over(weights * (places < before.unsqueeze(2)) @ events, slices)


def pool_on_rank(ranks: Ranks, name: str, is_over_ranks: bool) -> dict[str, Any]:
    own = [task for task, one in enumerate(OWNERS[ranks.world_size]) if one == ranks.rank]
    torch.manual_seed(2)
    events = torch.randn(TASKS, PLACES, HEADS * WIDTH, dtype=torch.float64)[own].requires_grad_()
    targets = torch.randn(TASKS, ROWS, HEADS * WIDTH, dtype=torch.float64)[own].requires_grad_()
    pool = Pool()
    attend = partial(getattr(pool, name), Peers())
    if is_over_ranks:
        slices = shard_sequences("ring", HEADS, ranks).slices
        attend = partial(getattr(pool, name), slices)
        pooled = pool_over_ranks(attend, events, targets, BEFORE[own], slices, ranks)
    else:
        pooled = attend(events, targets, BEFORE[own])
    (pooled.sin() * torch.arange(1, ROWS + 1).unsqueeze(1)).sum().backward()
    grads = [one.grad for one in pool.parameters() if one.grad is not None]
    return {"pooled": pooled.detach(), "own": [events.grad, targets.grad], "layers": grads}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["attend", "add"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_pool_each_tasks_events_as_its_owner_would(world_size: int, name: str) -> None:
    (alone,) = on_ranks(1, pool_on_rank, name, False)
    by_rank = on_ranks(world_size, pool_on_rank, name, True)
    assert (torch.cat([one["pooled"] for one in by_rank]) - alone["pooled"]).abs().max() <= 1e-10
    for index, whole in enumerate(alone["own"]):
        ours = torch.cat([one["own"][index] for one in by_rank])
        assert (ours - whole).abs().max() <= 1e-10
    assert len(alone["layers"]) == {"attend": 8, "add": 2}[name]
    for index, whole in enumerate(alone["layers"]):
        total = sum(one["layers"][index] for one in by_rank)
        assert (total - whole).abs().max() <= 1e-10


def attend_without_rows(ranks: Ranks) -> tuple[tuple[int, ...], float]:
    slices = shard_sequences("ring", HEADS, ranks).slices
    key = torch.ones(TASKS, HEADS, 6, WIDTH, requires_grad=True)
    query, none = torch.zeros(TASKS, HEADS, 0, WIDTH), torch.zeros(TASKS, 0, dtype=torch.int64)
    output = target_attention(query, key, key, none, slices)
    output.sum().backward()
    assert key.grad is not None
    return tuple(output.shape), key.grad.abs().sum().item()


@pytest.mark.distributed
def test_tasks_without_rows_are_no_special_case() -> None:
    for shape, grads in on_ranks(2, attend_without_rows):
        assert shape == (TASKS, HEADS, 0, WIDTH)
        assert grads == 0
