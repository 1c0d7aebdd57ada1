"""Attention over slices against plain attention over whole sequences, in float64."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gmeta.config.sharding import SequenceKind
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.attention import causal_attention, pointwise_attention
from gmeta.distributed.sequence.costs import SliceSize, attention_bytes, saved_bytes
from gmeta.distributed.sequence.peers import Peers
from gmeta.distributed.sequence.sharding import SequenceSharding, shard_sequences, split_ranks
from gmeta.distributed.sequence.tiles import RelativeBias
from gmeta.errors import ConfigError
from tests.distributed.harness import on_ranks
from tests.distributed.sequence.messages import counted_messages, counted_saved

# More places than a tile has; a task without events, one that ends within a slice.
TASKS, PLACES, WIDTH = 3, 640, 5
LENGTHS = torch.tensor([PLACES, 387, 0])
KINDS: tuple[SequenceKind, ...] = ("none", "ulysses", "ring", "both")
WORLDS = (1, 2, 4)
TOLERANCE = 1e-10
# With 2 heads on 4 ranks, "both" is 2 x 2, and Ulysses alone cannot be.
CASES = [
    (kind, heads, world)
    for world in WORLDS
    for heads in (2, 4)
    for kind in KINDS
    if (kind == "none") == (world == 1) and not (kind == "ulysses" and heads % world)
]


def inputs(heads: int) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and the weights of the output in the loss."""
    torch.manual_seed(heads)
    *parts, weights = torch.randn(4, TASKS, heads, PLACES, WIDTH, dtype=torch.float64).unbind()
    return parts, weights


def relative_bias(table_heads: int) -> RelativeBias:
    torch.manual_seed(7)
    position, time = torch.randn(2, table_heads, 9, dtype=torch.float64)
    times = torch.randint(0, 90, (TASKS, PLACES)).cumsum(1)
    edges = torch.tensor([1.0, 2, 10, 60, 300, 900, 3_600, 20_000])
    return RelativeBias(position, time, edges, times)


def seen() -> Tensor:
    """The keys that each query sees, by task, the same for all heads."""
    place = torch.arange(PLACES)
    return ((place <= place[:, None]) & (place < LENGTHS[:, None, None])).unsqueeze(1)


def plain_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.mT / math.sqrt(WIDTH)).masked_fill(~seen(), -math.inf)
    return scores.softmax(3).nan_to_num(0.0) @ value


def plain_pointwise(query: Tensor, key: Tensor, value: Tensor, bias: RelativeBias) -> Tensor:
    place = torch.arange(PLACES)
    distance = ((place[:, None] - place).unsqueeze(2) >= bias.edges).sum(2)
    passed = bias.times[:, :, None] - bias.times[:, None]
    bucket = (passed.unsqueeze(3) >= bias.edges).sum(3)
    scores = query @ key.mT + bias.position[:, distance] + bias.time[:, bucket].transpose(0, 1)
    return torch.nn.functional.silu(scores) * seen() @ value / (place[:, None] + 1)


def with_gradients(output: Tensor, weights: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def slice_of(tensor: Tensor, ranks: Ranks) -> Tensor:
    return tensor.chunk(ranks.world_size, dim=2)[ranks.rank].clone()


def attend_on_rank(ranks: Ranks) -> list[dict[str, Any]]:
    results = []
    for kind, heads, world in CASES:
        if world != ranks.world_size:
            continue
        sharding = shard_sequences(kind, heads, ranks)
        parts, weights = inputs(heads)
        leaves = [slice_of(part, ranks).requires_grad_() for part in parts]
        weights = slice_of(weights, ranks)
        for table_heads in (0, 1, heads):
            bias = relative_bias(table_heads)
            tables = [table.requires_grad_() for table in bias[:2]] if table_heads else []
            with counted_messages() as sent:
                with counted_saved(tables) as saved:
                    if table_heads:
                        output = pointwise_attention(*leaves, LENGTHS, bias, sharding)
                    else:
                        output = causal_attention(*leaves, LENGTHS, sharding)
                forward = sent.take()
                found = with_gradients(output, weights, [*leaves, *tables])
                results.append(
                    {"found": found, "sent": (forward, sent.take()), "saved": sum(saved.values())}
                )
    return results


@pytest.fixture(scope="module")
def attended() -> dict[tuple[str, int, int], list[list[dict[str, Any]]]]:
    """By case, for softmax and pointwise attention with one table and one a head: the ranks'."""
    found: dict[tuple[str, int, int], list[list[dict[str, Any]]]] = {}
    for world in WORLDS:
        by_result = [list(one) for one in zip(*on_ranks(world, attend_on_rank), strict=True)]
        cases = [case for case in CASES if case[2] == world]
        for index, case in enumerate(cases):
            found[case] = by_result[3 * index : 3 * index + 3]
    return found


def whole_from(by_rank: list[dict[str, Any]]) -> list[Tensor]:
    """Output and gradients of whole sequences; those of tables add up."""
    parts = list(zip(*(one["found"] for one in by_rank), strict=True))
    return [torch.cat(part, dim=2) for part in parts[:4]] + [
        torch.stack(part).sum(0) for part in parts[4:]
    ]


@cache
def expected(heads: int, table_heads: int) -> list[Tensor]:
    """Output and gradients of plain attention: softmax without tables."""
    (parts, weights), bias = inputs(heads), relative_bias(table_heads)
    leaves = [part.requires_grad_() for part in parts]
    tables = [table.requires_grad_() for table in bias[:2]] if table_heads else []
    output = plain_pointwise(*leaves, bias) if table_heads else plain_softmax(*leaves)
    return with_gradients(output, weights, [*leaves, *tables])


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_attend_as_the_whole_sequence_does(case: Any, attended: Any) -> None:
    _, heads, _ = case
    for table_heads, by_rank in zip((0, 1, heads), attended[case], strict=True):
        found = whole_from(by_rank)
        for ours, plain in zip(found, expected(heads, table_heads), strict=True):
            assert (ours - plain).abs().max() <= TOLERANCE
        # A task without events: nothing to see.
        assert not found[0][2].any()


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_send_and_keep_what_the_formulas_say(case: Any, attended: Any) -> None:
    kind, heads, world = case
    sharing, line = split_ranks(kind, heads, world)
    size = SliceSize(TASKS, heads, PLACES // world, WIDTH, 8)
    for table_heads, by_rank in zip((0, 1, heads), attended[case], strict=True):
        is_softmax = not table_heads
        for rank, one in enumerate(by_rank):
            assert one["sent"] == attention_bytes(size, sharing, line, rank // sharing, is_softmax)
            assert one["saved"] == saved_bytes(size, is_softmax)
        # The least there can be: every block of keys and values once to each rank that sees it.
        if sharing == 1:
            pairs = line * (line - 1) // 2
            assert sum(one["sent"][0] for one in by_rank) == pairs * 2 * size.block_bytes


def test_inputs_of_16_bits_are_computed_in_32() -> None:
    alone = SequenceSharding(Peers(), Peers(), Peers())
    halves = [one.to(torch.bfloat16).requires_grad_() for one in inputs(2)[0]]
    floats = [one.detach().float().requires_grad_() for one in halves]
    with torch.autocast("cpu", torch.bfloat16):
        found = causal_attention(*halves, LENGTHS, alone)
        grads = torch.autograd.grad(found.sum(), halves)
    expected = causal_attention(*floats, LENGTHS, alone)
    whole = torch.autograd.grad(expected.sum(), floats)
    for half, single in zip([found, *grads], [expected, *whole], strict=True):
        assert torch.equal(half, single.to(torch.bfloat16))


def test_ranks_are_split_by_heads_then_by_places() -> None:
    assert split_ranks("none", 4, 8) == (1, 1)
    assert split_ranks("ulysses", 8, 4) == (4, 1)
    assert split_ranks("ring", 4, 8) == (1, 8)
    assert split_ranks("both", 4, 8) == (4, 2)
    assert split_ranks("both", 6, 4) == (2, 2)
    with pytest.raises(ConfigError) as error:
        split_ranks("ulysses", 4, 8)
    assert str(error.value) == (
        'sharding.sequence = "ulysses" gives each rank the same number of heads, and 4 heads '
        "cannot be shared by 8 ranks. Set the number of heads to a multiple of 8, or "
        'sharding.sequence = "both" or "ring"'
    )
