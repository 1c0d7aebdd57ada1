"""HSTU: pointwise gated attention over events, with biases by distance and time.

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", ICML 2024 (arXiv 2402.17152), section 3.2.

Shape suffixes: T tasks, H longest list or task, D embedding width"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from gmeta_models.sequence.encoder import Past, StateEncoder, append_past, join_heads, split_heads

if TYPE_CHECKING:
    from gmeta_models.options import TransformerOptions

# Distances and seconds are told apart by powers of two.
_BUCKETS = 32


class PointwiseAttention(Protocol):
    """What queries meet keys and values by, [T, heads, H, D / heads] each: those up to their own
    place."""

    def pointwise(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, time: Tensor,
        edges: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return silu(q k^T + bias) v, divided by how many keys a query sees.

        Args:
            position, time: the bias by distance and by seconds passed, [heads, edges + 1]: an entry
                is for those that reach as many of the `edges`."""


class HSTU(StateEncoder):
    """The state behind each event, from it and those before it."""

    def __init__(self, width: int, num_numbers: int, options: TransformerOptions) -> None:
        super().__init__(width, num_numbers)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            _HstuBlock(self.width, options.heads, options.dropout) for _ in range(options.blocks)
        )
        self.norm = nn.LayerNorm(self.width)

    def states_THD(
        self, inputs_THD: Tensor, seconds_TH: Tensor, past: tuple[Past, ...] = ()
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Return the states behind the inputs; of `past` the last entry's keys are all times."""
        all_TH, own = seconds_TH, past[:-1]
        if past:
            all_TH = torch.cat([past[-1].key[:, 0, :, 0], seconds_TH], dim=1)
        num_new, num_all = seconds_TH.shape[1], all_TH.shape[1]
        place = torch.arange(num_all, device=all_TH.device)
        distance_HH = place[num_all - num_new :].unsqueeze(1) - place
        buckets = (
            find_buckets(distance_HH),
            find_buckets(seconds_TH.unsqueeze(2) - all_TH.unsqueeze(1)),
        )
        # By how many events each new one knows, itself among them.
        weight_HH = (distance_HH >= 0).to(inputs_THD.dtype)
        weight_HH = weight_HH / weight_HH.sum(dim=1, keepdim=True)
        states_THD, kept = self.dropout(inputs_THD), list[Past]()
        for index, block in enumerate(self.blocks):
            earlier = own[index] if own else None
            states_THD = block(
                states_THD, _LocalPointwiseAttention(buckets, weight_HH, earlier, kept)
            )
        times = all_TH[:, None, :, None]
        return self.norm(states_THD), (*kept, Past(times, times))


@dataclass(frozen=True)
class _LocalPointwiseAttention:
    """Attention of new events to all; adds what is kept of all to `kept`."""

    buckets: tuple[Tensor, Tensor]  # by `edges`, the same for all layers
    weight_HH: Tensor
    past: Past | None
    kept: list[Past]

    def pointwise(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, time: Tensor, _: Tensor
    ) -> Tensor:
        key, value = append_past(self.past, key, value)
        self.kept.append(Past(key, value))
        distance_HH, time_THH = self.buckets
        distance_bias = embedding(distance_HH, position.mT).permute(2, 0, 1)
        bias = embedding(time_THH, time.mT).permute(0, 3, 1, 2) + distance_bias
        attended: Tensor = silu(query @ key.mT + bias) * self.weight_HH @ value
        return attended


class _HstuBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attended_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.distance_bias, self.time_bias = (nn.Embedding(_BUCKETS, heads) for _ in range(2))
        nn.init.zeros_(self.distance_bias.weight)
        nn.init.zeros_(self.time_bias.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_THD: Tensor, attention: PointwiseAttention) -> Tensor:
        gate, *parts = silu(self.inputs(self.norm(rows_THD))).chunk(4, dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        tables = self.distance_bias.weight.mT, self.time_bias.weight.mT
        edges = bucket_edges(rows_THD.device)
        attended = attention.pointwise(query, key, value, *tables, edges)
        gated = self.attended_norm(join_heads(attended)) * gate
        output_THD: Tensor = rows_THD + self.dropout(self.output(gated))
        return output_THD


def find_buckets(difference: Tensor) -> Tensor:
    """Return the bucket of each difference: 0 below 1, then one for each power of two."""
    # By comparisons: no logarithm rounds a power of two to the bucket below.
    edges = bucket_edges(difference.device)
    return torch.bucketize(difference.to(torch.float32), edges, right=True)


def bucket_edges(device: torch.device) -> Tensor:
    """Return the least difference of each bucket but the first."""
    return 2.0 ** torch.arange(_BUCKETS - 1, device=device)
