"""DIN over events: attention pooling by each event's relation to the row's target.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018 (arXiv 1706.06978);
gmeta_models/din.py does it over a list of the row.

Shape suffixes: T tasks, R rows of a task, L events of a task, D embedding width, A hidden units"""

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

    def interest_TRD(
        self, rectangle: EventRectangle, events_TLD: Tensor, target_TRD: Tensor
    ) -> Tensor:
        """Return each row's events, pooled by their attention to its target; 0 without one."""
        of_h, of_e, of_difference, of_product = self.hidden.weight.mT.chunk(4)
        # h (diag(e) W) for (h * e) W: no tensor holds a vector for each pair of row and event.
        turned_TDX = (target_TRD.unsqueeze(3) * of_product).transpose(1, 2).flatten(2)
        pairs_TRLA = (events_TLD @ turned_TDX).unflatten(2, (target_TRD.shape[1], -1))
        pairs_TRLA = pairs_TRLA.transpose(1, 2) + (events_TLD @ (of_h + of_difference)).unsqueeze(1)
        own_TRA = target_TRD @ (of_e - of_difference) + self.hidden.bias
        weight_TRL = self.weight((pairs_TRLA + own_TRA.unsqueeze(2)).relu()).squeeze(3)
        pooled_TRD: Tensor = (weight_TRL * is_before_TRL(rectangle)) @ events_TLD
        return pooled_TRD


def is_before_TRL(rectangle: EventRectangle) -> Tensor:
    """Return which events each row knows."""
    places_L = torch.arange(rectangle.position_TLC.shape[1], device=rectangle.before_TR.device)
    return places_L < rectangle.before_TR.unsqueeze(2)
