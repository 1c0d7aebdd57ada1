"""Linear attention over slices against its sum over all pairs, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu

from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.costs import SliceSize, state_bytes
from gmeta.distributed.sequence.linear import append_linear, linear_attention
from gmeta.distributed.sequence.peers import Peers
from gmeta.distributed.sequence.sharding import shard_sequences
from tests.distributed.harness import on_ranks
from tests.distributed.sequence.messages import counted_messages

TASKS, HEADS, PLACES, WIDTH = 3, 2, 360, 5  # a slice of four is no whole number of chunks
LENGTHS = torch.tensor([PLACES, 201, 0])


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(4, TASKS, HEADS, PLACES, WIDTH, dtype=torch.float64))


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    place = torch.arange(PLACES)
    seen = (place <= place[:, None]) & (place < LENGTHS[:, None, None, None])
    weights = (elu(query) + 1) @ (elu(key) + 1).mT * seen
    total = weights.sum(3, keepdim=True)
    return weights / (total + (total == 0)) @ value


def attend_on_rank(ranks: Ranks) -> tuple[list[Tensor], Tensor, tuple[int, int]]:
    slices = shard_sequences("ring", HEADS, ranks).slices
    *leaves, weights = (one.chunk(slices.size, 2)[slices.rank].clone() for one in inputs())
    leaves = [one.requires_grad_() for one in leaves]
    with counted_messages() as sent:
        output, state = linear_attention(*leaves, LENGTHS, slices)
        forward = sent.take()
        grads = torch.autograd.grad((output * weights).sum(), leaves)
    return [output.detach(), *grads], state.detach(), (forward, sent.take())


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_slices_attend_by_a_state_that_is_passed_on(world_size: int) -> None:
    *leaves, weights = inputs()
    leaves = [one.requires_grad_() for one in leaves]
    output = plain(*leaves)
    expected = [output, *torch.autograd.grad((output * weights).sum(), leaves)]
    by_rank = on_ranks(world_size, attend_on_rank)
    for index, whole in enumerate(expected):
        ours = torch.cat([found[index] for found, _, _ in by_rank], dim=2)
        assert (ours - whole).abs().max() <= 1e-10
    state = state_bytes(SliceSize(TASKS, HEADS, PLACES // world_size, WIDTH, 8))
    for rank, (_, _, sent) in enumerate(by_rank):
        assert sent == (state * (rank < world_size - 1), state * (rank > 0))
    _, key, value = (one.detach() for one in leaves)
    key, value = key[:1], value[:1]  # the task without padding
    behind = (elu(key) + 1).mT @ torch.cat([value, torch.ones_like(value[..., :1])], dim=3)
    assert (by_rank[-1][1][:1] - behind).abs().max() <= 1e-10


def test_an_event_appended_to_a_state_attends_as_in_a_whole_pass() -> None:
    query, key, value, _ = inputs()
    whole = plain(query, key, value)[:1]
    parts = [one[:1, :, :300] for one in (query, key, value)]
    _, state = linear_attention(*parts, torch.tensor([300]), Peers())
    for place in range(300, 310):
        event = [one[:1, :, place] for one in (query, key, value)]
        output, state = append_linear(*event, state)
        assert (output - whole[:, :, place]).abs().max() <= 1e-10
    # And many at once.
    rest = [one[:1, :, 310:] for one in (query, key, value)]
    output, _ = linear_attention(*rest, torch.tensor([PLACES - 310]), Peers(), state)
    assert (output - whole[:, :, 310:]).abs().max() <= 1e-10
