"""What carries a step's messages between the ranks on a CPU: gloo, or memory that they share.

Every rank makes the same calls in the same order; what a call returns may be waited for in any
order, or not at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Returns when the result is there."""


class Transport(ABC):
    """Swaps and sums between all ranks of the job."""

    @abstractmethod
    def swap(
        self,
        given: Tensor,
        counts_given: Sequence[int],
        taken: Tensor,
        counts_taken: Sequence[int],
        divisor: int = 1,
    ) -> Pending:
        """Give the other ranks values / divisor, flat, and take theirs; the counts are in their
        order.
        """

    @abstractmethod
    def add(self, values: Tensor) -> Pending:
        """Replace flat values by their element-wise sum over the ranks, equal on all of them."""


@final
class Gloo(Transport):
    """Over TCP, between any hosts. `rows` carries the swaps and `control` the sums."""

    def __init__(self, rows: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self._rows = rows
        self._control = control

    def swap(
        self,
        given: Tensor,
        counts_given: Sequence[int],
        taken: Tensor,
        counts_taken: Sequence[int],
        divisor: int = 1,
    ) -> Pending:
        """See Transport."""
        own = self._rows.rank()
        work: dist.Work = dist.all_to_all_single(
            taken,
            given if divisor == 1 else given / divisor,
            [*counts_taken[:own], 0, *counts_taken[own:]],
            [*counts_given[:own], 0, *counts_given[own:]],
            group=self._rows,
            async_op=True,
        )
        return work

    def add(self, values: Tensor) -> Pending:
        """See Transport."""
        work: dist.Work = dist.all_reduce(values, group=self._control, async_op=True)
        return work


@final
class Alone(Transport):
    """One rank: there is nobody to talk to."""

    def swap(
        self,
        given: Tensor,
        counts_given: Sequence[int],
        taken: Tensor,
        counts_taken: Sequence[int],
        divisor: int = 1,
    ) -> Pending:
        """See Transport."""
        raise ValueError("one rank has nobody to swap values with")

    def add(self, values: Tensor) -> Pending:
        """See Transport."""
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done
