"""SASRec: a causal transformer over events.

Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018 (arXiv 1808.09781).
Departures: normalised before each layer, GELU, and rotary positions (Su et al., arXiv 2104.09864),
by which a state does not depend on how many events were cut off before the first.

Shape suffixes: T tasks, L events of a task, D embedding width, H heads"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, scaled_dot_product_attention

from gmeta_models.sequence.encoder import Past, StateEncoder, append_past, join_heads, split_heads

if TYPE_CHECKING:
    from gmeta_models.options import SasrecOptions

_ROTATION_BASE = 10_000.0


class SASRec(StateEncoder):
    """The state behind each event, from it and those before it."""

    def __init__(self, width: int, num_numbers: int, options: SasrecOptions) -> None:
        super().__init__(width, num_numbers)
        dropout = options.dropout
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            _Block(width, options.heads, dropout, options.attention == "linear")
            for _ in range(options.blocks)
        )
        self.norm = nn.LayerNorm(width)

    def states_TLD(
        self, inputs_TLD: Tensor, seconds_TL: Tensor, past: tuple[Past, ...] = ()
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Return the states behind the inputs, and keys and values of all events so far."""
        states_TLD, kept = self.dropout(inputs_TLD), []
        for place, block in enumerate(self.blocks):
            states_TLD, own = block(states_TLD, past[place] if past else None)
            kept.append(own)
        return self.norm(states_TLD), tuple(kept)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, is_linear: bool) -> None:
        super().__init__()
        self.heads, self.is_linear = heads, is_linear
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_TLD: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        query, key, value = (
            split_heads(part, self.heads)
            for part in self.query_key_value(self.attention_norm(rows_TLD)).chunk(3, dim=2)
        )
        first = 0 if past is None else past.key_THLD.shape[2]
        query, key = rotate(query, first), rotate(key, first)
        past = append_past(past, key, value)
        if self.is_linear:
            attended = attend_linearly(query, past.key_THLD, past.value_THLD)
        else:
            attended = attend_causally(query, past.key_THLD, past.value_THLD)
        rows_TLD = rows_TLD + self.dropout(self.output(join_heads(attended)))
        hidden = self.dropout(torch.nn.functional.gelu(self.up(self.mlp_norm(rows_TLD))))
        return rows_TLD + self.dropout(self.down(hidden)), past


def rotate(rows_THLD: Tensor, first: int) -> Tensor:
    """Return queries or keys turned by their place, `first` for the first: products of two then
    depend on the distance between their places alone."""
    length, width = rows_THLD.shape[2:]
    half = width // 2
    device, dtype = rows_THLD.device, rows_THLD.dtype
    speed_D = _ROTATION_BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    places_L = torch.arange(first, first + length, device=device, dtype=torch.float64)
    angle_LD = places_L.unsqueeze(1) * speed_D
    cos_LD, sin_LD = angle_LD.cos().to(dtype), angle_LD.sin().to(dtype)
    left, right = rows_THLD[..., :half], rows_THLD[..., half : 2 * half]
    turned = [left * cos_LD - right * sin_LD, left * sin_LD + right * cos_LD]
    # Of an odd width the last number stays as it is.
    return torch.cat([*turned, rows_THLD[..., 2 * half :]], dim=3)


def attend_causally(query_THLD: Tensor, key_THLD: Tensor, value_THLD: Tensor) -> Tensor:
    """Return the softmax attention of each query, the last of which are the newest keys' own, over
    the keys up to its own."""
    num_new, num_all = query_THLD.shape[2], key_THLD.shape[2]
    if num_new == num_all:
        return scaled_dot_product_attention(query_THLD, key_THLD, value_THLD, is_causal=True)
    mask = _is_known(num_new, num_all, query_THLD.device) if num_new > 1 else None
    return scaled_dot_product_attention(query_THLD, key_THLD, value_THLD, attn_mask=mask)


def attend_linearly(query_THLD: Tensor, key_THLD: Tensor, value_THLD: Tensor) -> Tensor:
    """Return the same with weights phi(q) . phi(k) for phi = elu + 1, normalised to sum 1
    (Katharopoulos et al., arXiv 2006.16236)."""
    query, key = elu(query_THLD) + 1.0, elu(key_THLD) + 1.0
    known = _is_known(query.shape[2], key.shape[2], query.device)
    weight_THLL = (query @ key.mT) * known
    return (weight_THLL @ value_THLD) / weight_THLL.sum(dim=3, keepdim=True)


def _is_known(num_new: int, num_all: int, device: torch.device) -> Tensor:
    places = torch.arange(num_all, device=device)
    return places <= places[num_all - num_new :].unsqueeze(1)
