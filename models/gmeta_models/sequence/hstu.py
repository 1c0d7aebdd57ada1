"""HSTU: pointwise gated attention over events, with biases by distance and time.

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", ICML 2024 (arXiv 2402.17152), section 3.2.

Shape suffixes: T tasks, L events of a task, D embedding width, H heads"""

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

    def states_TLD(
        self, inputs_TLD: Tensor, seconds_TL: Tensor, past: tuple[Past, ...] = ()
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Return the states behind the inputs; of `past` the last entry's keys are all times."""
        all_TL, own = seconds_TL, past[:-1]
        if past:
            all_TL = torch.cat([past[-1].key_THLD[:, 0, :, 0], seconds_TL], dim=1)
        num_new, num_all = seconds_TL.shape[1], all_TL.shape[1]
        place = torch.arange(num_all, device=all_TL.device)
        distance_LL = place[num_all - num_new :].unsqueeze(1) - place
        buckets = (
            find_buckets(distance_LL),
            find_buckets(seconds_TL.unsqueeze(2) - all_TL.unsqueeze(1)),
        )
        # By how many events each new one knows, itself among them.
        weight_LL = (distance_LL >= 0).to(inputs_TLD.dtype)
        weight_LL = weight_LL / weight_LL.sum(dim=1, keepdim=True)
        states_TLD, kept = self.dropout(inputs_TLD), []
        for index, block in enumerate(self.blocks):
            states_TLD, mine = block(states_TLD, buckets, weight_LL, own[index] if own else None)
            kept.append(mine)
        times = all_TL[:, None, :, None]
        return self.norm(states_TLD), (*kept, Past(times, times))


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
        self, rows_TLD: Tensor, buckets: tuple[Tensor, Tensor], weight_LL: Tensor, past: Past | None
    ) -> tuple[Tensor, Past]:
        gate, *parts = silu(self.inputs(self.norm(rows_TLD))).chunk(4, dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        past = append_past(past, key, value)
        distance_LL, time_TLL = buckets
        bias_HLL = self.distance_bias(distance_LL).permute(2, 0, 1)
        bias_THLL = self.time_bias(time_TLL).permute(0, 3, 1, 2) + bias_HLL
        attended = silu(query @ past.key_THLD.mT + bias_THLL) * weight_LL @ past.value_THLD
        gated = self.attended_norm(join_heads(attended)) * gate
        return rows_TLD + self.dropout(self.output(gated)), past


def find_buckets(difference: Tensor) -> Tensor:
    """Return the bucket of each difference: 0 below 1, then one for each power of two."""
    # By comparisons: no logarithm rounds a power of two to the bucket below.
    bounds = 2.0 ** torch.arange(_BUCKETS - 1, device=difference.device)
    return torch.bucketize(difference.to(torch.float32), bounds, right=True)
