"""The interface of an exchange of a step's rows: wire.py is ours, torchrec.py TorchRec's."""

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
        # Sum of the last gradient of this rank's rows, on the device: finite if that was.
        self.gradient_sum = torch.zeros((), device=device)

    def on_gradient(self, grad_UD: Tensor) -> None:
        """Record the gradient of all rows of a step."""
        # One pass without a mask; a sum that overflows is as far off as one that is infinite.
        self.gradient_sum = grad_UD.sum()

    def reading(self) -> dict[str, float]:
        """Return what to log of the steps since the last call."""
        return {}

    def prepare(self, episodes: "Collated") -> "Collated":
        """Return these episodes, on the host, with all done that can be before `enqueue`, in one
        block of pinned memory. Any thread may call it."""
        return episodes.with_plan(self.planner.plan(episodes)).pack()

    def enqueue(self, episodes: "Collated") -> "Collated":
        """Start to fetch these episodes' rows; return them on the rank's device. Collective."""
        if episodes.plan is None:
            episodes = episodes.with_plan(self.planner.plan(episodes))
        # The first message tells each rank how many rows are needed of it.
        there = episodes.to(self._device)
        assert there.plan is not None
        return there.with_fetch(self._prefetch(there.plan))

    @abstractmethod
    def _prefetch(self, plan: "RowPlan") -> "RowFetch":
        """Start to fetch the rows of a plan, which is on the rank's device."""
