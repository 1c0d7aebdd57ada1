"""What brings the rows of a step to the ranks that need them: `wire` is ours, `torchrec` is
TorchRec's.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gmeta.batches.accumulate import Arranged
    from gmeta.batches.episodes import RowFetch, RowPlan
    from gmeta.parallel.exchange.planning import Planner


class Exchange(ABC):
    """Brings the rows that episodes need."""

    planner: "Planner"  # with it another process can do what comes before a step

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Sum of the gradient of this rank's rows in the last backward, on the device: finite if
        # that was.
        self.gradient_sum = torch.zeros((), device=device)

    def saw_gradient(self, grad_UD: Tensor) -> None:
        """Take note of the gradient of all rows of a step."""
        # One pass without a mask; a sum that overflows is as far off as one that is infinite.
        self.gradient_sum = grad_UD.sum()

    def prepared(self, episodes: "Arranged") -> "Arranged":
        """Return these episodes, which are on the host, with everything done that can be done
        before `announce`, in one block of pinned memory. Any thread may call it, for any batch."""
        return episodes.planned(self.planner.plan(episodes)).packed()

    def announce(self, episodes: "Arranged") -> "Arranged":
        """Tell all ranks how many rows these episodes, which are on the host, need of each, and
        return them on the rank's device with their rows on the way. They may be `prepared`."""
        if episodes.plan is None:
            episodes = episodes.planned(self.planner.plan(episodes))
        there = episodes.to(self._device)
        assert there.plan is not None
        return there.fetched_by(self._fetch(there.plan))

    @abstractmethod
    def _fetch(self, plan: "RowPlan") -> "RowFetch":
        """Start to fetch the rows of a plan, which is on the rank's device."""
