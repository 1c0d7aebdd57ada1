"""SIM: of very many events the few that matter to the target are searched, then attended.

Pi et al., "Search-based User Interest Modeling with Lifelong Sequential Behavior Data", CIKM 2020
(arXiv 2006.05639): events of the target's category, found before the step. Chen et al., "End-to-
End User Behavior Retrieval in Click-Through Rate Prediction Model", 2021 (arXiv 2108.04468): events
whose embeddings hash to nearly the target's bits, found in the step.

Shape suffixes: T tasks, R rows of a task, L events of a task, D embedding width, H heads, B bits"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gmeta_models.sequence.din_events import is_before_TRL
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
        self.register_buffer("directions_DB", torch.randn(self.width, _BITS))

    def interest_TRD(
        self, rectangle: EventRectangle, events_TLD: Tensor, target_TRD: Tensor
    ) -> Tensor:
        """Return the attended events; the output's bias alone where there is none."""
        known_TRL = is_before_TRL(rectangle)
        if self.by_hash and events_TLD.shape[1] > self.newest:
            return self._over_found(events_TLD, target_TRD, known_TRL)
        query = split_heads(self.query(target_TRD), self.heads)
        key, value = (split_heads(of(events_TLD), self.heads) for of in (self.key, self.value))
        score_THRL = query @ key.mT / math.sqrt(query.shape[3])
        weight_THRL = softmax_of_known(score_THRL, known_TRL.unsqueeze(1))
        attended_TRD: Tensor = self.output(join_heads(weight_THRL @ value))
        return attended_TRD

    def _over_found(self, events_TLD: Tensor, target_TRD: Tensor, known_TRL: Tensor) -> Tensor:
        """Return the attention over the events nearest to each target by their hash."""
        directions_DB = cast(Tensor, self.directions_DB).to(events_TLD.dtype)
        bits_TLB, wanted_TRB = (
            (rows.detach() @ directions_DB).sign() for rows in (events_TLD, target_TRD)
        )
        # Equal bits minus different ones; the newer of two equally near.
        newness_L = torch.linspace(0.0, 0.5, events_TLD.shape[1], device=events_TLD.device)
        nearness_TRL = wanted_TRB @ bits_TLB.mT + newness_L.to(events_TLD.dtype)
        nearness_TRL = nearness_TRL.masked_fill(~known_TRL, -math.inf)
        found_TRL = nearness_TRL.topk(self.newest, dim=2).indices
        chosen = found_TRL.flatten(1).unsqueeze(2).expand(-1, -1, self.width)
        events_TRLD = events_TLD.gather(1, chosen).unflatten(1, found_TRL.shape[1:])
        rows_LD, target_1D = events_TRLD.flatten(0, 1), target_TRD.flatten(0, 1).unsqueeze(1)
        query = split_heads(self.query(target_1D), self.heads)
        key, value = (split_heads(of(rows_LD), self.heads) for of in (self.key, self.value))
        score = query @ key.mT / math.sqrt(query.shape[3])
        known = known_TRL.gather(2, found_TRL).flatten(0, 1)[:, None, None]
        attended = join_heads(softmax_of_known(score, known) @ value)
        found_TRD: Tensor = self.output(attended)
        return found_TRD.view_as(target_TRD)


def softmax_of_known(score: Tensor, known: Tensor) -> Tensor:
    """Return the softmax over the known entries of the last axis; 0 where none is known."""
    score = score.masked_fill(~known, -math.inf)
    highest = score.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(score.dtype).min)
    weight = (score - highest.detach()).exp()
    return weight / weight.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(score.dtype).tiny)
