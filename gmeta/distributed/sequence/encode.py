"""Long sequences, each owned by one rank, encoded in slices by all.

Shape suffix: T tasks"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.attention import causal_attention, pointwise_attention
from gmeta.distributed.sequence.linear import linear_attention
from gmeta.distributed.sequence.peers import Peers, swap
from gmeta.distributed.sequence.sharding import SequenceSharding
from gmeta.distributed.sequence.tiles import RelativeBias
from gmeta_models.sequence.sasrec import find_rotation, rotate

T = TypeVar("T")


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

    def rotate(self, rows: Tensor) -> Tensor:
        """Return queries or keys turned by their places in the whole sequence."""
        return rotate(rows, find_rotation(rows, self.sharding.first(rows.shape[2])))

    def softmax(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the softmax attention."""
        return causal_attention(query, key, value, self.length_T, self.sharding)

    def linear(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the linear attention."""
        return linear_attention(query, key, value, self.length_T, self.sharding.slices)[0]

    def pointwise(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, time: Tensor,
        edges: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return HSTU's attention, with these tables of its bias. Raises ValueError: no times."""
        if self.times is None:
            raise ValueError("pointwise attention has a bias by time: pass the events' times")
        bias = RelativeBias(position, time, edges, self.times)
        return pointwise_attention(query, key, value, self.length_T, bias, self.sharding)


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
    slices, num_places = sharding.slices, states.shape[1]
    of_ranks = gather(length_T, slices, ranks)
    lengths, owned = torch.cat(of_ranks), [len(one) for one in of_ranks]
    places = _places_of_slice(lengths, slices)
    if times is not None:
        times = _copy_to_all(_fit(times, places * slices.size), slices, owned)
    # Nothing of whole sequences stays here meanwhile.
    states = _to_slices(states, places, slices, owned)
    for layer in layers:
        states = layer(states, Slices(sharding, lengths, times))
    own = [owned[slices.rank]] * slices.size
    back = swap(states, slices, owned, own).unflatten(0, (slices.size, owned[slices.rank]))
    return _fit(back.transpose(0, 1).flatten(1, 2), num_places)


def pool_over_ranks(
    pool: Callable[[Tensor, Tensor, Tensor], Tensor], events: Tensor, targets: Tensor,
    before: Tensor, slices: Peers, ranks: Ranks,
) -> Tensor:  # fmt: skip
    """Return what `pool` makes of this rank's own tasks' events for each of their rows, [tasks,
    rows, ...]. Collective, and as in `encode_over_ranks` for long sequences, and losses that use
    what they get.

    Args:
        pool: of this rank's slice of all tasks' events, all their targets and `before`; it adds
            over the slices, by `target_attention` or `peers.add_over`.
        events: [tasks, places, width].
        targets: [tasks, rows, width].
        before: how many events each row knows, [tasks, rows]; on the host."""
    of_ranks = gather(before, slices, ranks)
    owned, rows = [len(one) for one in of_ranks], max(one.shape[1] for one in of_ranks)
    before = torch.cat([_fit(one, rows) for one in of_ranks])
    places = _places_of_slice(before, slices)
    received = _to_slices(events, places, slices, owned)
    pooled = pool(received, _copy_to_all(_fit(targets, rows), slices, owned), before)
    return pooled.split_with_sizes(owned)[slices.rank][:, : targets.shape[1]]


def gather(value: T, slices: Peers, ranks: Ranks) -> list[T]:
    """Return every rank's value of the host."""
    values = [value] * slices.size
    if slices.size > 1:
        dist.all_gather_object(values, value, group=ranks.control)
    return values


def _places_of_slice(lengths: Tensor, slices: Peers) -> int:
    return max(1, -(-max(lengths.flatten().tolist(), default=0) // slices.size))


def _to_slices(states: Tensor, places: int, slices: Peers, owned: Sequence[int]) -> Tensor:
    """Return this rank's slice of all tasks; `owned` are the ranks' numbers of them."""
    if not states.requires_grad:
        states = states.detach().requires_grad_()  # here too a gradient comes back to be sent on
    by_rank = _fit(states, places * slices.size).unflatten(1, (slices.size, places))
    return swap(by_rank.transpose(0, 1).flatten(0, 1), slices, [len(states)] * slices.size, owned)


def _copy_to_all(values: Tensor, slices: Peers, owned: Sequence[int]) -> Tensor:
    """Return the values of all tasks, on every rank; a gradient is the sum of all ranks'."""
    copies = values.expand(slices.size, *values.shape).flatten(0, 1)
    return swap(copies, slices, [len(values)] * slices.size, owned)


def _fit(tensor: Tensor, places: int) -> Tensor:
    """Return [tasks, places, ...] with so many places, missing ones as 0."""
    missing = places - tensor.shape[1]
    behind = (0, 0) * (tensor.dim() - 2) + (0, missing)
    return pad(tensor, behind) if missing else tensor  # or a copy
