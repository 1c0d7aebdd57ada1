"""Encoders over all ranks' slices of long sequences against the owners' own passes, in float64.

Shape suffixes: T tasks, D embedding width"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from gmeta.config.sharding import SequenceKind
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.costs import SliceSize, attention_bytes, moved_bytes
from gmeta.distributed.sequence.encode import Slices, encode_over_ranks
from gmeta.distributed.sequence.peers import Peers
from gmeta.distributed.sequence.sharding import SequenceSharding, shard_sequences, split_ranks
from tests.distributed.harness import on_ranks
from tests.distributed.sequence.messages import counted_messages, counted_saved

HEADS, WIDTH = 4, 12
# Of all ranks: one of four has no task, and none is as long as the slices together.
LENGTHS = [151, 90, 203, 17, 160]
OWNERS = {1: [0] * 5, 2: [0, 0, 1, 1, 1], 4: [0, 0, 1, 1, 3]}
KINDS: tuple[SequenceKind, ...] = ("none", "ulysses", "ring", "both")
EDGES = torch.tensor([1.0, 10, 60, 300, 900])


class Block(nn.Module):
    """Pre-norm, with one of the attentions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.position = nn.Parameter(torch.randn(HEADS, len(EDGES) + 1))
        self.time = nn.Parameter(torch.randn(1, len(EDGES) + 1))

    def forward(self, states: Tensor, slices: Slices) -> Tensor:
        parts = self.inputs(self.norms[0](states)).unflatten(2, (3, HEADS, -1))
        attend: Any = getattr(slices, self.name)
        if self.name == "pointwise":
            attend = partial(attend, position=self.position, time=self.time, edges=EDGES)
        attended = attend(*parts.permute(2, 0, 3, 1, 4))
        states = states + self.output(attended.transpose(1, 2).flatten(2))
        return states + self.narrow(gelu(self.wide(self.norms[1](states))))


def encoder(name: str) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block(name), Block(name)]).double()


def tasks_of(owner: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, states and times of its tasks, padded as the owner pleases."""
    own = [index for index, one in enumerate(OWNERS[world_size]) if one == owner]
    lengths_T = torch.tensor([LENGTHS[index] for index in own], dtype=torch.int64)
    longest = max(lengths_T.tolist(), default=0) + owner
    states_TD, times = torch.zeros(len(own), longest, WIDTH), torch.zeros(len(own), longest)
    for row, index in enumerate(own):
        random = torch.Generator().manual_seed(index)
        states_TD[row, : LENGTHS[index]] = torch.randn(LENGTHS[index], WIDTH, generator=random)
        passed = torch.randint(0, 40, (LENGTHS[index],), generator=random)
        times[row, : LENGTHS[index]] = passed.cumsum(0)
    return lengths_T, states_TD.double(), times.to(torch.int64)


def weighted(states: Tensor, lengths_T: Tensor) -> Tensor:
    """A loss of the states at events."""
    is_event = torch.arange(states.shape[1]) < lengths_T[:, None]
    factor = torch.linspace(-1, 1, WIDTH, dtype=states.dtype)
    return ((states * factor).sin().sum(2) * is_event).sum()


def encode_on_rank(ranks: Ranks, name: str, *kinds: SequenceKind) -> list[dict[str, Any]]:
    return [encode_by(ranks, name, kind) for kind in kinds]


def encode_by(ranks: Ranks, name: str, kind: SequenceKind) -> dict[str, Any]:
    layers, (lengths_T, states, times) = encoder(name), tasks_of(ranks.rank, ranks.world_size)
    sharding = shard_sequences(kind, HEADS, ranks)
    states.requires_grad_()
    with counted_messages() as sent:
        with counted_saved(layers.parameters()) as saved:
            own_times = times if name == "pointwise" else None
            encoded = encode_over_ranks([*layers], states, lengths_T, sharding, ranks, own_times)
        weighted(encoded, lengths_T).backward()
    is_event = torch.arange(states.shape[1]) < lengths_T[:, None]
    assert states.grad is not None
    return {
        "states": encoded[is_event].detach(),
        "inputs": states.grad[is_event],
        "layers": [one.grad for one in layers.parameters() if one.grad is not None],
        "saved": sum(saved.values()),
        "sent": sent.take(),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["softmax", "pointwise", "linear"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_encode_each_task_as_its_owner_would(world_size: int, name: str) -> None:
    ((alone,),) = on_ranks(1, encode_on_rank, name, "none")
    by_kind = zip(*on_ranks(world_size, encode_on_rank, name, *KINDS), strict=True)
    for kind, by_rank in zip(KINDS, by_kind, strict=True):
        for what in ("states", "inputs"):
            assert (torch.cat([one[what] for one in by_rank]) - alone[what]).abs().max() <= 1e-10
        for index, whole in enumerate(alone["layers"]):
            total = sum(one["layers"][index] for one in by_rank)
            assert (total - whole).abs().max() <= 1e-10
        if kind == "none":
            assert [one["sent"] for one in by_rank] == [0] * world_size
            continue
        # A rank of so many keeps its share, but for the padding to slices of equal length.
        places = -(-max(LENGTHS) // world_size)
        share = places / max(LENGTHS)
        assert max(one["saved"] for one in by_rank) <= 1.01 * share * alone["saved"]
        if name == "softmax":
            sharing, line = split_ranks(kind, HEADS, world_size)
            size = SliceSize(len(LENGTHS), HEADS, places, WIDTH // HEADS, 8)
            for rank, one in enumerate(by_rank):
                own_tasks = OWNERS[world_size].count(rank)
                both_ways = sum(attention_bytes(size, sharing, line, rank // sharing))
                moved = moved_bytes(own_tasks, size, world_size)
                assert one["sent"] == 2 * both_ways + moved


def encode_little(ranks: Ranks, kind: SequenceKind, length: int) -> tuple[list[int], float]:
    """One rank has a task of so many events, none below 0; the other has none."""
    sharding, num_tasks = shard_sequences(kind, HEADS, ranks), int(length >= 0 and not ranks.rank)
    states = torch.zeros(num_tasks, 3, WIDTH, dtype=torch.float64, requires_grad=ranks.rank > 0)
    lengths_T = torch.full((num_tasks,), length)
    layers = encoder("softmax")
    encoded = encode_over_ranks([*layers], states, lengths_T, sharding, ranks)
    if length >= 0:
        encoded.sum().backward()  # the inputs have no gradient, the layers do, on both ranks
        assert all(one.grad is not None for one in layers[0].inputs.parameters())
    return list(encoded.shape), encoded.detach().isnan().sum().item()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_ranks_without_tasks_and_tasks_without_events_are_no_special_case(
    kind: SequenceKind,
) -> None:
    for length, num_tasks in ((-1, 0), (0, 1), (1, 1)):
        (shape, nans), (other_shape, _) = on_ranks(2, encode_little, kind, length)
        assert (shape, nans) == ([num_tasks, 3, WIDTH], 0)
        assert other_shape == [0, 3, WIDTH]


def test_a_bias_by_time_asks_for_times() -> None:
    sharding = SequenceSharding(Peers(), Peers(), Peers())
    slices = Slices(sharding, torch.tensor([3]))
    with pytest.raises(ValueError) as error:
        encoder("pointwise")[0](torch.zeros(1, 3, WIDTH, dtype=torch.float64), slices)
    assert str(error.value) == "pointwise attention has a bias by time: pass the events' times"
