"""What carries a step's messages between the ranks: gloo over TCP; NCCL between GPUs.

Every rank makes the same calls in the same order; what a call returns may be waited for in any
order, or not at all."""

from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return when the result is there."""


@final
class Swap:
    """Values that the ranks give each other, under way."""

    def __init__(
        self, work: dist.Work | None, taken: Tensor | None, receive_counts: Sequence[int]
    ) -> None:
        self._work = work
        self._out = taken
        self._receive_counts = receive_counts

    def parts(self) -> list[Tensor]:
        """Wait for what each of the other ranks gave, and return it in their order."""
        if self._work is None or self._out is None:
            return []
        self._work.wait()
        return list(self._out.split_with_sizes(list(self._receive_counts)))


@final
class Transport:
    """Swaps and sums between all ranks of the job; nothing where there is one rank alone.

    `rows` carries the swaps and `control` the sums. Values on a GPU go through the job's own group,
    NCCL: nothing here waits for them, only the stream does."""

    def __init__(self, rows: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self._rows = rows
        self._control = control

    def swap(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> Swap:
        """Start to give the other ranks these values, flat, and to take theirs, into `taken` if
        there is one; the counts are in the ranks' order."""
        if self._rows.size() == 1:
            return Swap(None, None, ())
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
        return Swap(work, out, receive_counts)

    def add(self, values: Tensor) -> Pending:
        """Start to replace flat values by their element-wise sum over the ranks, equal on all of
        them."""
        if self._control.size() == 1:
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done
        work: dist.Work = dist.all_reduce(values, group=self._control, async_op=True)
        return work
