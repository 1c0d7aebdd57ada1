"""SASRec: a causal transformer over events.

Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018 (arXiv 1808.09781).
Departures: normalised before each layer, GELU, and rotary positions (Su et al., arXiv 2104.09864),
by which a state does not depend on how many events were cut off before the first.

Shape suffixes: T tasks, H longest list or task, D embedding width"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, scaled_dot_product_attention

from gmeta_models.sequence.encoder import Past, StateEncoder, append_past, join_heads, split_heads

if TYPE_CHECKING:
    from gmeta_models.options import SasrecOptions

_ROTATION_BASE = 10_000.0
Rotation = tuple[Tensor, Tensor]  # cosine and sine, [H, D / heads / 2] each


class CausalAttention(Protocol):
    """What queries meet keys and values by, [T, heads, H, D / heads] each: those up to their own
    place."""

    def rotate(self, rows: Tensor) -> Tensor:
        """Return queries or keys turned by their places in the whole sequence."""

    def softmax(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the softmax attention."""

    def linear(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the linear attention."""


class SASRec(StateEncoder):
    """The state behind each event, from it and those before it."""

    def __init__(self, width: int, num_numbers: int, options: SasrecOptions) -> None:
        super().__init__(width, num_numbers)
        dropout = options.dropout
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            _TransformerBlock(width, options.heads, dropout, options.attention == "linear")
            for _ in range(options.blocks)
        )
        self.norm = nn.LayerNorm(width)

    def states_THD(
        self, inputs_THD: Tensor, seconds_TH: Tensor, past: tuple[Past, ...] = ()
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Return the states behind the inputs, and keys and values of all events so far."""
        states_THD, kept, rotations = self.dropout(inputs_THD), list[Past](), list[Rotation]()
        for place, block in enumerate(self.blocks):
            earlier = past[place] if past else None
            states_THD = block(states_THD, _LocalCausalAttention(earlier, kept, rotations))
        return self.norm(states_THD), tuple(kept)


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, is_linear: bool) -> None:
        super().__init__()
        self.heads, self.is_linear = heads, is_linear
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_THD: Tensor, attention: CausalAttention) -> Tensor:
        width = rows_THD.shape[2]
        both, value = self.query_key_value(self.attention_norm(rows_THD)).split(
            [2 * width, width], dim=2
        )
        # Queries and keys as twice as many heads: one event is appended in few calls.
        query, key = attention.rotate(split_heads(both, 2 * self.heads)).chunk(2, dim=1)
        value = split_heads(value, self.heads)
        attend = attention.linear if self.is_linear else attention.softmax
        attended = join_heads(attend(query, key, value))
        rows_THD = rows_THD + self.dropout(self.output(attended))
        hidden = self.dropout(torch.nn.functional.gelu(self.up(self.mlp_norm(rows_THD))))
        output_THD: Tensor = rows_THD + self.dropout(self.down(hidden))
        return output_THD


class _LocalCausalAttention:
    """Attention of new events to all; adds what is kept of all to `kept`. Blocks share the first
    one's rotation."""

    def __init__(self, past: Past | None, kept: list[Past], rotations: list[Rotation]) -> None:
        self._past, self._kept, self._rotations = past, kept, rotations

    def rotate(self, rows: Tensor) -> Tensor:
        if not self._rotations:
            first = 0 if self._past is None else int(self._past.key.shape[2])
            self._rotations.append(find_rotation(rows, first))
        return rotate(rows, self._rotations[0])

    def softmax(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._kept.append(append_past(self._past, key, value))
        return attend_causally(query, *self._kept[-1])

    def linear(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._kept.append(append_past(self._past, key, value))
        return attend_linearly(query, *self._kept[-1])


def find_rotation(rows: Tensor, first: int) -> Rotation:
    """Return cosine and sine of the angles that queries or keys [T, heads, H, D / heads] turn by,
    the first of them at place `first`."""
    length, half = rows.shape[2], rows.shape[3] // 2
    device, dtype = rows.device, rows.dtype
    speed = _ROTATION_BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    places_H = torch.arange(first, first + length, device=device, dtype=torch.float64)
    angle = places_H.unsqueeze(1) * speed
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(rows: Tensor, rotation: Rotation) -> Tensor:
    """Return queries or keys turned by their places: products of two then depend on the distance
    between their places alone."""
    (cos, sin), half = rotation, rows.shape[3] // 2
    left, right = rows[..., :half], rows[..., half : 2 * half]
    turned = [left * cos - right * sin, left * sin + right * cos]
    # Of an odd width the last number stays as it is.
    return torch.cat([*turned, rows[..., 2 * half :]], dim=3)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the softmax attention of each query, the last of which are the newest keys' own, over
    the keys up to its own."""
    num_new, num_all = query.shape[2], key.shape[2]
    if num_new == num_all:
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    mask = _is_known(num_new, num_all, query.device) if num_new > 1 else None
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def attend_linearly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same with weights phi(q) . phi(k) for phi = elu + 1, normalised to sum 1
    (Katharopoulos et al., arXiv 2006.16236)."""
    query, key = elu(query) + 1.0, elu(key) + 1.0
    known = _is_known(query.shape[2], key.shape[2], query.device)
    weight = (query @ key.mT) * known
    return (weight @ value) / weight.sum(dim=3, keepdim=True)


def _is_known(num_new: int, num_all: int, device: torch.device) -> Tensor:
    places = torch.arange(num_all, device=device)
    return places <= places[num_all - num_new :].unsqueeze(1)
