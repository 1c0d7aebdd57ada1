"""What carries a step's messages between the ranks: gloo, or memory that they share; NCCL between
GPUs.

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
        """Return when the result is there."""


class Swap(ABC):
    """Values that the ranks give each other, under way."""

    @abstractmethod
    def parts(self) -> list[Tensor]:
        """Wait for what each of the other ranks gave, and return it in their order. It may lie in
        memory of theirs: read it while the Swap lives, and never write it.
        """


class Transport(ABC):
    """Swaps and sums between all ranks of the job."""

    @abstractmethod
    def swap(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> Swap:
        """Start to give the other ranks these values, flat, and to take theirs, into `taken` if
        there is one; the counts are in the ranks' order.
        """

    @abstractmethod
    def add(self, values: Tensor) -> Pending:
        """Start to replace flat values by their element-wise sum over the ranks, equal on all of
        them.
        """


@final
class GlooTransport(Transport):
    """Over TCP, between any hosts. `rows` carries the swaps and `control` the sums.

    Values on a GPU go through the job's own group, NCCL: nothing here waits for them, only the
    stream does.
    """

    def __init__(self, rows: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self._rows = rows
        self._control = control

    def swap(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> "_GlooSwap":
        """Start one AlltoAll."""
        own = self._rows.rank()
        out = values.new_empty(sum(receive_counts)) if out is None else out
        work: dist.Work = dist.all_to_all_single(
            out,
            values,
            # gloo counts every rank; what a rank keeps for itself does not travel.
            [*receive_counts[:own], 0, *receive_counts[own:]],
            [*send_counts[:own], 0, *send_counts[own:]],
            group=self._rows if values.device.type == "cpu" else None,
            async_op=True,
        )
        return _GlooSwap(work, out, receive_counts)

    def add(self, values: Tensor) -> Pending:
        """Start one AllReduce over the `control` group."""
        work: dist.Work = dist.all_reduce(values, group=self._control, async_op=True)
        return work


@final
class _GlooSwap(Swap):
    def __init__(self, work: dist.Work, out: Tensor, receive_counts: Sequence[int]) -> None:
        self._work = work
        self._out = out
        self._receive_counts = receive_counts

    def parts(self) -> list[Tensor]:
        """Wait for the AlltoAll, and return each rank's part."""
        self._work.wait()
        return list(self._out.split_with_sizes(list(self._receive_counts)))


@final
class SingleRankTransport(Transport):
    """One rank: there is nobody to talk to."""

    def swap(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> "_NoSwap":
        """Return a swap with nobody."""
        return _NoSwap()

    def add(self, values: Tensor) -> Pending:
        """Leave the values: they are the sum."""
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


@final
class _NoSwap(Swap):
    def parts(self) -> list[Tensor]:
        """Return nothing: there is no other rank."""
        return []
