"""HSTU: pointwise gated attention over events, with biases by distance and time.

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", ICML 2024 (arXiv 2402.17152), section 3.2.

Shape suffixes: T tasks, H longest list or task, D embedding width"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from gmeta_models.sequence.encoder import Past, StateEncoder, append_past, join_heads, split_heads

if TYPE_CHECKING:
    from gmeta_models.options import TransformerOptions

# Distances and seconds are told apart by powers of two.
_BUCKETS = 32


class HSTU(StateEncoder):
    """The state behind each event, from it and those before it."""

    def __init__(self, width: int, num_numbers: int, options: TransformerOptions) -> None:
        super().__init__(width, num_numbers)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            _Block(self.width, options.heads, options.dropout) for _ in range(options.blocks)
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
        states_THD, kept = self.dropout(inputs_THD), []
        for index, block in enumerate(self.blocks):
            states_THD, mine = block(states_THD, buckets, weight_HH, own[index] if own else None)
            kept.append(mine)
        times = all_TH[:, None, :, None]
        return self.norm(states_THD), (*kept, Past(times, times))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attended_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.distance_bias, self.time_bias = (nn.Embedding(_BUCKETS, heads) for _ in range(2))
        nn.init.zeros_(self.distance_bias.weight)
        nn.init.zeros_(self.time_bias.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, rows_THD: Tensor, buckets: tuple[Tensor, Tensor], weight_HH: Tensor, past: Past | None
    ) -> tuple[Tensor, Past]:
        gate, *parts = silu(self.inputs(self.norm(rows_THD))).chunk(4, dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        past = append_past(past, key, value)
        distance_HH, time_THH = buckets
        distance_bias = self.distance_bias(distance_HH).permute(2, 0, 1)
        bias = self.time_bias(time_THH).permute(0, 3, 1, 2) + distance_bias
        attended = silu(query @ past.key.mT + bias) * weight_HH @ past.value
        gated = self.attended_norm(join_heads(attended)) * gate
        return rows_THD + self.dropout(self.output(gated)), past


def find_buckets(difference: Tensor) -> Tensor:
    """Return the bucket of each difference: 0 below 1, then one for each power of two."""
    # By comparisons: no logarithm rounds a power of two to the bucket below.
    bounds = 2.0 ** torch.arange(_BUCKETS - 1, device=difference.device)
    return torch.bucketize(difference.to(torch.float32), bounds, right=True)
