"""The messages of a step between the ranks: gloo over TCP; NCCL between GPUs.

Every rank makes the same calls in the same order; results may be waited for in any order."""

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
    """Values that the ranks send each other, under way."""

    def __init__(
        self, work: dist.Work | None, taken: Tensor | None, receive_counts: Sequence[int]
    ) -> None:
        self._work = work
        self._out = taken
        self._receive_counts = receive_counts

    def parts(self) -> list[Tensor]:
        """Return the values of each of the other ranks, in their order; waits for them."""
        if self._work is None or self._out is None:
            return []
        self._work.wait()
        return list(self._out.split_with_sizes(list(self._receive_counts)))


@final
class Transport:
    """Swaps (by `rows`) and sums (by `control`) between ranks; nothing with a single rank."""

    def __init__(
        self,
        rows: dist.ProcessGroup,
        control: dist.ProcessGroup,
        devices: dist.ProcessGroup | None = None,
    ) -> None:
        self._rows = rows
        self._control = control
        # On a GPU through NCCL, by None the job's own group: only the stream waits.
        self._devices = devices

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return self._rows.rank()

    @property
    def num_others(self) -> int:
        """Return the number of ranks beside this one."""
        return self._rows.size() - 1

    def swap(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> Swap:
        """Start to send the other ranks these values, flat, and to receive theirs, in `out` if it
        is not None; the counts are in the ranks' order."""
        if not self.num_others:
            return Swap(None, None, ())
        own = self.rank
        out = values.new_empty(sum(receive_counts)) if out is None else out
        work: dist.Work = dist.all_to_all_single(
            out,
            values,
            # gloo counts every rank; what a rank keeps for itself does not travel.
            [*receive_counts[:own], 0, *receive_counts[own:]],
            [*send_counts[:own], 0, *send_counts[own:]],
            group=self._rows if values.device.type == "cpu" else self._devices,
            async_op=True,
        )
        return Swap(work, out, receive_counts)

    def add(self, values: Tensor) -> Pending:
        """Start to replace flat values by their element-wise sum over the ranks."""
        if self._control.size() == 1:
            # A single rank's values are their own sum.
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done
        work: dist.Work = dist.all_reduce(values, group=self._control, async_op=True)
        return work
