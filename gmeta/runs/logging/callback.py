"""Callbacks: actions of other packages during a run; docs/extending.md shows one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

from torch import Tensor

from gmeta.runs.logging.logger import Reading, RunInfo, Status

if TYPE_CHECKING:  # a config is checked where there are no ranks
    from gmeta.distributed.ranks import Ranks
    from gmeta.distributed.stopping import Stop


@final
class Run:
    """The run that calls a callback: where it stands, and the way to end it."""

    def __init__(self, info: RunInfo, ranks: Ranks, stop: Stop) -> None:
        self.info = info
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.step = info.done_steps
        self.epoch = 0  # counts from 0
        self._stop = stop

    def stop(self, reason: str) -> None:
        """End the run before one of the next steps, with a checkpoint to resume from; all ranks end
        alike. `reason` says who stops and why, as "Patience: no better in 3 validations"."""
        self._stop.is_requested, self._stop.reason = True, reason


class Callback:
    """Override the methods you need. Every rank makes one, without arguments, and calls it in the
    same places with the same numbers, unless a method says otherwise. An error ends the run."""

    def on_train_begin(self, run: Run) -> None:
        """Called before the first step."""

    def on_step_end(self, run: Run, loss: Tensor) -> None:
        """Called after each step with this rank's part of the loss, whose mean over ranks is the
        step's; `loss.item()` waits for the device."""

    def on_log(self, run: Run, reading: Reading) -> None:
        """Called with each reading: mean loss over all ranks and the last run.log_every_steps
        steps, learning rates, gradient norm; its speed is the rank's own."""

    def on_validation_end(self, run: Run, scores: Mapping[str, float | None]) -> None:
        """Called with the metrics of data.valid_split; None where one is undefined."""

    def on_checkpoint(self, run: Run, checkpoint: Path) -> None:
        """Called once a checkpoint is whole: one written in the background is of an earlier step,
        and ranks may be some steps apart."""

    def on_train_end(self, run: Run, status: Status) -> None:
        """Called after the last step, unless the run failed."""
