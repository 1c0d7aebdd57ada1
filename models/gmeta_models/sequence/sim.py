"""SIM: of very many events the few that matter to the target are searched, then attended.

Pi et al., "Search-based User Interest Modeling with Lifelong Sequential Behavior Data", CIKM 2020
(arXiv 2006.05639): events of the target's category, found before the step. Chen et al., "End-to-
End User Behavior Retrieval in Click-Through Rate Prediction Model", 2021 (arXiv 2108.04468): events
whose embeddings hash to nearly the target's bits, found in the step.

Shape suffixes: T tasks, N rows, H longest list or task, D embedding width"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gmeta_models.sequence.din_events import is_before_TNH
from gmeta_models.sequence.encoder import EventEncoder, EventRectangle, join_heads, split_heads

if TYPE_CHECKING:
    from gmeta_models.options import SimOptions

_BITS = 32


class SIM(EventEncoder):
    """Attention of the row's target over the events that were found for it."""

    def __init__(self, width: int, num_numbers: int, options: SimOptions) -> None:
        super().__init__(width, num_numbers)
        self.heads, self.newest = options.heads, options.newest
        self.query, self.key, self.value, self.output = (
            nn.Linear(self.width, self.width) for _ in range(4)
        )
        # Found by category, the events come row by row; else the hash finds them here.
        self.by_hash = options.search == "hash"
        self.register_buffer("directions", torch.randn(self.width, _BITS))

    def interest_TND(
        self, rectangle: EventRectangle, events_THD: Tensor, target_TND: Tensor
    ) -> Tensor:
        """Return the attended events; the output's bias alone where there is none."""
        known_TNH = is_before_TNH(events_THD, rectangle.before_TN)
        if self.by_hash and events_THD.shape[1] > self.newest:
            return self._over_found(events_THD, target_TND, known_TNH)
        return self._attend(target_TND, events_THD, known_TNH)

    def _over_found(self, events_THD: Tensor, target_TND: Tensor, known_TNH: Tensor) -> Tensor:
        """Return the attention over the events nearest to each target by their hash."""
        directions = cast(Tensor, self.directions).to(events_THD.dtype)
        bits, wanted_bits = (
            (rows.detach() @ directions).sign() for rows in (events_THD, target_TND)
        )
        # Equal bits minus different ones; the newer of two equally near.
        places_H = torch.arange(events_THD.shape[1], device=events_THD.device)
        newness_H = places_H / (2 * places_H[-1] + 2)  # below 0.5
        nearness_TNH = wanted_bits @ bits.mT + newness_H.to(events_THD.dtype)
        nearness_TNH = nearness_TNH.masked_fill(~known_TNH, -math.inf)
        found_TNH = nearness_TNH.topk(self.newest, dim=2).indices
        chosen = found_TNH.flatten(1).unsqueeze(2).expand(-1, -1, self.width)
        events_found = events_THD.gather(1, chosen).unflatten(1, found_TNH.shape[1:])
        known_TNH = known_TNH.gather(2, found_TNH)
        # Each row attends to its own events, as a task of its own.
        attended = self._attend(
            target_TND.flatten(0, 1).unsqueeze(1),
            events_found.flatten(0, 1),
            known_TNH.flatten(0, 1).unsqueeze(1),
        )
        return attended.view_as(target_TND)

    def _attend(self, target_TND: Tensor, events_THD: Tensor, known_TNH: Tensor) -> Tensor:
        query = split_heads(self.query(target_TND), self.heads)
        key, value = (split_heads(of(events_THD), self.heads) for of in (self.key, self.value))
        score = query @ key.mT / math.sqrt(query.shape[3])
        weight = softmax_of_known(score, known_TNH.unsqueeze(1))
        attended_TND: Tensor = self.output(join_heads(weight @ value))
        return attended_TND


def softmax_of_known(score: Tensor, known: Tensor) -> Tensor:
    """Return the softmax over the known entries of the last axis; 0 where none is known."""
    score = score.masked_fill(~known, -math.inf)
    highest = score.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(score.dtype).min)
    weight = (score - highest.detach()).exp()
    return weight / weight.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)
