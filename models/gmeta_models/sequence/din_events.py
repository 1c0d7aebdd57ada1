"""DIN over events: attention pooling by each event's relation to the row's target.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018 (arXiv 1706.06978);
gmeta_models/din.py does it over a list of the row.

Shape suffixes: T tasks, N rows, H longest list or task, M multi-id features, D embedding width"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gmeta_models.sequence.encoder import EventEncoder, EventRectangle

_HIDDEN = 36


class DinEvents(EventEncoder):
    """interest = sum_l a(h_l, e) h_l over the events that a row knows, for its target e."""

    def __init__(self, width: int, num_numbers: int) -> None:
        super().__init__(width, num_numbers)
        # Of [h, e, h - e, h * e], in that order.
        self.hidden = nn.Linear(4 * self.width, _HIDDEN)
        self.weight = nn.Linear(_HIDDEN, 1)

    def interest_TND(
        self, rectangle: EventRectangle, events_THD: Tensor, target_TND: Tensor
    ) -> Tensor:
        """Return each row's events, pooled by their attention to its target; 0 without one."""
        if self.over_ranks is None or rectangle.known is None:
            return self._pool_TND(events_THD, target_TND, rectangle.before_TN)
        return self.over_ranks.pool(self._pool_TND, events_THD, target_TND, rectangle.known)

    def _pool_TND(self, events_THD: Tensor, target_TND: Tensor, before_TN: Tensor) -> Tensor:
        of_h, of_e, of_difference, of_product = self.hidden.weight.mT.chunk(4)
        # h (diag(e) W) for (h * e) W: no tensor holds a vector for each pair of row and event.
        turned = (target_TND.unsqueeze(3) * of_product).transpose(1, 2).flatten(2)
        pairs = (events_THD @ turned).unflatten(2, (target_TND.shape[1], -1))
        pairs = pairs.transpose(1, 2) + (events_THD @ (of_h + of_difference)).unsqueeze(1)
        own = target_TND @ (of_e - of_difference) + self.hidden.bias
        weight_TNH = self.weight((pairs + own.unsqueeze(2)).relu()).squeeze(3)
        pooled_TND: Tensor = (weight_TNH * is_before_TNH(events_THD, before_TN)) @ events_THD
        return pooled_TND


def is_before_TNH(events_THD: Tensor, before_TN: Tensor) -> Tensor:
    """Return which events each row knows."""
    places_H = torch.arange(events_THD.shape[1], device=before_TN.device)
    return places_H < before_TN.unsqueeze(2)
