"""Linear attention (arXiv 2006.16236) over slices of sequences: a state of width x width is passed
on between ranks (LASP, arXiv 2404.02882), and an event is appended at a cost without its length.

Queries, keys and values have the shape [tasks, heads, places, width]; a state has [tasks, heads,
width, width + 1]: the sum of features of keys times values, and times 1 in its last column.

Shape suffix: T tasks"""

import torch
from torch import Tensor
from torch.nn.functional import elu, pad

from gmeta.distributed.sequence.peers import Peers, sum_before

CHUNK = 64  # places that meet by their scores, as in tiles.SMALLEST_TILE; others by a state


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, length_T: Tensor, slices: Peers,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of this rank's places to all places up to themselves, weighted by
    phi(q) phi(k) with phi = elu + 1, 0 for a place that sees none; and the state behind this slice.

    Args:
        length_T: how many places of each whole sequence are events.
        state: of the events before the sequence, on every rank."""
    places = query.shape[2]
    first = slices.rank * places
    is_event = torch.arange(first, first + places) < length_T.unsqueeze(1)
    feature = (elu(key) + 1) * is_event.to(key.device)[:, None, :, None]
    # [tasks, heads, chunks, places, width]; padding at the end has no features.
    by_chunk = (0, 0, 0, -places % CHUNK)
    queries, keys, values = (
        pad(one, by_chunk).unflatten(2, (-1, CHUNK))
        for one in (elu(query) + 1, feature, pad(value, (0, 1), value=1.0))
    )
    added = keys.mT @ values
    behind = added.cumsum(2)
    before = sum_before(behind[:, :, -1], slices)
    if state is not None:
        before = before + state
    # What a chunk sees of those before it, of this rank and of others.
    seen = before.unsqueeze(2) + behind - added
    sums = (queries @ keys.mT).tril() @ values + queries @ seen
    output = _divide_sums(sums).flatten(2, 3)[:, :, :places]
    return output, before + behind[:, :, -1]


def append_linear(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention of one more event of each task to itself and all before it, and the
    state behind it. Queries, keys and values: [tasks, heads, width]."""
    added = (elu(key) + 1).unsqueeze(3) * pad(value, (0, 1), value=1.0).unsqueeze(2)
    state = state + added
    return _divide_sums(((elu(query) + 1).unsqueeze(2) @ state).squeeze(2)), state


def _divide_sums(sums: Tensor) -> Tensor:
    """Return the sums but for the last column, divided by it; 0 where it is."""
    weighted, total = sums.tensor_split([-1], dim=-1)
    return weighted / total.where(total != 0, torch.ones_like(total))
