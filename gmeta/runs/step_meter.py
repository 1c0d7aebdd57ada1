"""What all ranks did in the steps since the last reading: loss, speed, wait for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gmeta.distributed.ranks import Ranks, sum_over_ranks, wait_for_hosts


class StepMeter:
    """Loss, speed and data wait of the steps since the last reading, over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._wait_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._loss = torch.zeros((), device=self._ranks.device)
        self._steps = 0
        self._shown_steps = 0
        self._rows = 0
        self._began = time.perf_counter()

    def add(self, loss: Tensor, num_rows: int, terms_per_example: float = 1.0) -> None:
        """Count one outer step over all ranks' `num_rows`; does not wait for the device.

        `terms_per_shown` times the loss is what is shown of the step; nothing where it is 0."""
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
        """Leave the time that the block takes out of the speed of steps. Collective."""
        wait_for_hosts(self._ranks)
        self._loss.item()  # waits for what the device still has to do
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def read(self, wait_s: float) -> dict[str, float | None]:
        """Return the means since the last reading. Collective. `wait_s` is the reader's running
        total; `loss` is None if no step had a query row."""
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
