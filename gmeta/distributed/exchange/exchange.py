"""What brings the rows of a step to the ranks that need them: `wire` is ours, `torchrec` is
TorchRec's."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gmeta.data.accumulate import Collated
    from gmeta.data.episodes import RowFetch, RowPlan
    from gmeta.distributed.exchange.planning import Planner


class Exchange(ABC):
    """Brings the rows that episodes need."""

    planner: "Planner"  # with it another process can do what comes before a step

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Sum of the gradient of this rank's rows in the last backward, on the device: finite if
        # that was.
        self.gradient_sum = torch.zeros((), device=device)

    def on_gradient(self, grad_UD: Tensor) -> None:
        """Take note of the gradient of all rows of a step."""
        # One pass without a mask; a sum that overflows is as far off as one that is infinite.
        self.gradient_sum = grad_UD.sum()

    def prepare(self, episodes: "Collated") -> "Collated":
        """Return these episodes, which are on the host, with everything done that can be done
        before `announce`, in one block of pinned memory. Any thread may call it, for any batch."""
        return episodes.with_plan(self.planner.plan(episodes)).pack()

    def enqueue(self, episodes: "Collated") -> "Collated":
        """Tell all ranks how many rows these episodes, which are on the host, need of each, and
        return them on the rank's device with their rows on the way. They may be `prepared`."""
        if episodes.plan is None:
            episodes = episodes.with_plan(self.planner.plan(episodes))
        there = episodes.to(self._device)
        assert there.plan is not None
        return there.with_fetch(self._prefetch(there.plan))

    @abstractmethod
    def _prefetch(self, plan: "RowPlan") -> "RowFetch":
        """Start to fetch the rows of a plan, which is on the rank's device."""
