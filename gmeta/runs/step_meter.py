"""Loss, speed and data wait of all ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from gmeta.distributed.ranks import Ranks, sum_over_ranks, wait_for_hosts


class StepMeter:
    """Loss, speed and data wait of the steps since the last reading, over all ranks."""

    def __init__(
        self, ranks: Ranks, pause: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Measure all ranks' steps; `pause` makes a context in which none is under way."""
        self._ranks, self._pause = ranks, pause
        self._wait_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._loss = torch.zeros((), device=self._ranks.device)
        self._steps = 0
        self._shown_steps = 0
        self._rows = 0
        self._began = time.perf_counter()

    def add(self, loss: Tensor, num_rows: int, terms_per_example: float = 1.0) -> None:
        """Count one outer step over all ranks' `num_rows`; does not wait for the device."""
        # The mean over all terms becomes the mean over reported ones; without any it is left out.
        self._loss.add_(loss.detach(), alpha=terms_per_example)
        self._steps += 1
        self._shown_steps += terms_per_example > 0
        self._rows += num_rows

    @property
    def steps(self) -> int:
        """Return the number of steps since the last reading."""
        return self._steps

    @contextmanager
    def exclude_time(self) -> Iterator[None]:
        """Leave the time of the block out of the speed of steps. Collective."""
        with self._pause():
            wait_for_hosts(self._ranks)
            self._loss.item()  # waits for what the device still has to do
            began = time.perf_counter()
            yield
        self._began += time.perf_counter() - began

    def read(self, wait_s: float) -> dict[str, float | None]:
        """Collective. Return the means since the last reading; `wait_s` is a running total."""
        wait_for_hosts(self._ranks)
        # Waits for the device: the time below covers the work.
        loss = self._loss.item() / max(self._shown_steps, 1)
        elapsed_s = time.perf_counter() - self._began
        # A local loss is weighted by the world size, so the mean over ranks is the global loss.
        loss_sum, wait_sum = sum_over_ranks([loss, wait_s - self._wait_s], self._ranks)
        world_size = self._ranks.world_size
        values: dict[str, float | None] = {
            "loss": loss_sum / world_size if self._shown_steps else None,
            "samples_per_s": self._rows / elapsed_s,
            "data_wait_share": wait_sum / world_size / elapsed_s,
        }
        self._wait_s = wait_s
        self._reset()
        return values
