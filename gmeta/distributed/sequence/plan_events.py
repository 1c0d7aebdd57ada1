"""What encoding long tasks over ranks costs in a step: bytes sent by arithmetic (costs.py), bytes
kept for the gradient as torch's layers save them.

Shape suffixes: T tasks, N rows, H longest list or task, D embedding width"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gmeta.config.sharding import SequenceKind
from gmeta.distributed.sequence.costs import (
    SliceSize,
    attention_bytes,
    moved_bytes,
    pooling_bytes,
    saved_bytes,
    state_bytes,
)
from gmeta.distributed.sequence.linear import CHUNK, linear_attention
from gmeta.distributed.sequence.peers import Peers
from gmeta.distributed.sequence.sharding import split_ranks
from gmeta_models.sequence.encoder import EventEncoder, EventRectangle, StateEncoder
from gmeta_models.sequence.hstu import HSTU
from gmeta_models.sequence.sasrec import find_rotation, rotate

_COUNTED_PLACES = CHUNK  # whole chunks of linear attention


class LongEventsCost(NamedTuple):
    """A step's long tasks, and what they cost a rank."""

    tasks: float  # of all ranks
    sent_bytes: float  # by the busiest rank, forward and backward
    kept_bytes: float  # of a rank, for the gradient


def estimate_long_events(
    encoder: EventEncoder, kind: SequenceKind, events_T: Sequence[int], rows: int, ranks: int
) -> LongEventsCost:
    """Return the cost of tasks of so many events and rows each, which the ranks own equally."""
    sent = kept = 0.0
    # As LongEventsOverRanks lays them out: up to each power of two they share a rectangle.
    sizes = sorted({(one - 1).bit_length() for one in events_T})
    for size in sizes:
        own = [one for one in events_T if (one - 1).bit_length() == size]
        of_size = _estimate_rectangle(encoder, kind, len(own), max(own), rows, ranks)
        sent, kept = sent + of_size[0], kept + of_size[1]
    return LongEventsCost(len(events_T), sent, kept)


def _estimate_rectangle(
    encoder: EventEncoder, kind: SequenceKind, tasks: int, longest: int, rows: int, ranks: int
) -> tuple[float, float]:
    if not isinstance(encoder, StateEncoder):
        places = -(-longest // ranks)
        sent = pooling_bytes(-(-tasks // ranks), tasks, places, rows, encoder.width, ranks)
        return sent, tasks * places * _count_kept_by_pooling(encoder, rows)
    heads, blocks = cast(int, encoder.blocks[0].heads), len(encoder.blocks)
    sharing, line = split_ranks(kind, heads, ranks)
    size = SliceSize(tasks, heads, -(-(longest + 1) // ranks), encoder.width // heads)
    is_linear = getattr(encoder.blocks[0], "is_linear", False)
    is_softmax = not (is_linear or isinstance(encoder, HSTU))
    sent = 2 * state_bytes(size) * (ranks > 1)
    if not is_linear:
        of_places = (attention_bytes(size, sharing, line, at, is_softmax) for at in range(line))
        sent = max(map(sum, of_places))
    moved = moved_bytes(-(-tasks // ranks), size, ranks) if ranks > 1 else 0
    of_layers = tasks * size.places * _count_kept_by_layers(encoder)
    of_attention = 0 if is_linear else blocks * saved_bytes(size, is_softmax)
    return blocks * sent + moved, of_attention + of_layers


class _LocalAttention:
    """Attention that keeps nothing where what it would keep is known by arithmetic."""

    def rotate(self, rows: Tensor) -> Tensor:
        return rotate(rows, find_rotation(rows, 0))

    def softmax(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        return query + key + value

    pointwise = softmax

    def linear(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return linear_attention(query, key, value, torch.tensor([query.shape[2]]), Peers())[0]


def _count_kept_by_layers(encoder: StateEncoder) -> float:
    """Return the bytes that all layers keep of a place, without softmax and pointwise attention."""

    def run(rows_THD: Tensor) -> Tensor:
        for layer in encoder.layers():
            rows_THD = layer(rows_THD, _LocalAttention())
        return rows_THD

    return _count_kept(run, encoder)


def _count_kept_by_pooling(encoder: EventEncoder, rows: int) -> float:
    def run(events_THD: Tensor) -> Tensor:
        none_TN = torch.zeros(1, rows, dtype=torch.int64)
        known_TN = none_TN + events_THD.shape[1]
        no_events = torch.zeros(1, 0, 0)
        rectangle = EventRectangle(none_TN, no_events, known_TN[0, :1], none_TN, known_TN)
        targets = torch.zeros(1, rows, encoder.width)
        return encoder.interest_TND(rectangle, events_THD, targets)

    return _count_kept(run, encoder)


def _count_kept(run: Callable[[Tensor], Tensor], encoder: EventEncoder) -> float:
    """Return the bytes that are kept for the gradient of each further place."""
    weights = {one.untyped_storage().data_ptr() for one in encoder.parameters()}

    def count(places: int) -> int:
        kept: dict[int, Tensor] = {}  # with the tensors, so that no place in memory is used twice

        def keep(tensor: Tensor) -> Tensor:
            place = tensor.untyped_storage().data_ptr()
            if place not in weights:
                kept[place] = tensor
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            run(torch.zeros(1, places, encoder.width, requires_grad=True))
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    return (count(2 * _COUNTED_PLACES) - count(_COUNTED_PLACES)) / _COUNTED_PLACES
