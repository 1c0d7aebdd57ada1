"""Long sequences, each owned by one rank, encoded in slices by all.

Shape suffixes: T tasks, D embedding width"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.attention import causal_attention, pointwise_attention
from gmeta.distributed.sequence.linear import linear_attention
from gmeta.distributed.sequence.peers import swap
from gmeta.distributed.sequence.sharding import SequenceSharding
from gmeta.distributed.sequence.tiles import RelativeBias


@dataclass(frozen=True)
class Slices:
    """Attention of this rank's slices of sequences to all before: what layers are given, which know
    no ranks. Queries, keys and values have the shape [tasks, heads, places, width].

    Attributes:
        length_T: the events of each whole sequence; on the host.
        times: of all places, [tasks, places of all ranks]."""

    sharding: SequenceSharding
    length_T: Tensor
    times: Tensor | None = None

    def softmax(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the softmax attention."""
        return causal_attention(query, key, value, self.length_T, self.sharding)

    def linear(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the linear attention."""
        return linear_attention(query, key, value, self.length_T, self.sharding.slices)[0]

    def pointwise(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, time: Tensor,
        edges: Tensor, num_keys: int,
    ) -> Tensor:  # fmt: skip
        """Return HSTU's attention, with these tables of its bias. Raises ValueError: no times."""
        if self.times is None:
            raise ValueError("pointwise attention has a bias by time: pass the events' times")
        bias = RelativeBias(position, time, edges, self.times)
        parts = query, key, value
        return pointwise_attention(*parts, self.length_T, bias, self.sharding, num_keys)


def encode_over_ranks(
    layers: Sequence[Callable[[Tensor, Slices], Tensor]], states: Tensor, length_T: Tensor,
    sharding: SequenceSharding, ranks: Ranks, times: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the states of this rank's own tasks behind all layers, [tasks, places, width], as
    `states` has them: each rank encodes its slice of all ranks' tasks. Collective.

    Pass long sequences only: all are padded to the longest of any rank. Every rank's loss must use
    what it gets, even if it has no task: the others wait for its part of the gradient.

    Args:
        layers: each maps [tasks, places, width] to the same shape.
        length_T: the events of own tasks; on the host.
        times: of own events, [tasks, places]."""
    slices = sharding.slices
    if slices.size == 1:
        return _encode(layers, states, Slices(sharding, length_T, times))
    of_ranks: list[list[int]] = [[]] * slices.size
    dist.all_gather_object(of_ranks, length_T.tolist(), group=ranks.control)
    lengths = torch.tensor([length for one in of_ranks for length in one], dtype=torch.int64)
    if not len(lengths):
        return states
    num_tasks, num_places, _ = states.shape
    places = max(1, -(-int(lengths.max()) // slices.size))
    # A rank's tasks, for each rank; and the tasks of all ranks, each from its owner.
    own, owned = [num_tasks] * slices.size, [len(one) for one in of_ranks]
    if times is not None:
        copies = _fit(times.unsqueeze(2), places * slices.size).repeat(slices.size, 1, 1)
        times = swap(copies, slices, own, owned).squeeze(2)
    if not states.requires_grad:
        states = states.detach().requires_grad_()  # here too a gradient comes back to be sent on
    by_rank = _fit(states, places * slices.size).unflatten(1, (slices.size, places))
    # Nothing of whole sequences stays here meanwhile.
    states = swap(by_rank.transpose(0, 1).flatten(0, 1), slices, own, owned)
    del by_rank
    states = _encode(layers, states, Slices(sharding, lengths, times))
    back = swap(states, slices, owned, own).unflatten(0, (slices.size, num_tasks))
    return _fit(back.transpose(0, 1).flatten(1, 2), num_places)


def _encode(
    layers: Sequence[Callable[[Tensor, Slices], Tensor]], states: Tensor, slices: Slices
) -> Tensor:
    for layer in layers:
        states = layer(states, slices)
    return states


def _fit(tensor: Tensor, places: int) -> Tensor:
    """Return so many places of [tasks, places, ...], more of them as 0."""
    missing = places - tensor.shape[1]
    return pad(tensor, (0, 0, 0, missing)) if missing else tensor  # or a copy
