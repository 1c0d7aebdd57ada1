"""Callbacks: actions of other packages during a run; docs/extending.md shows one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from gmeta.runs.logging.logger import Reading, RunInfo, Status

if TYPE_CHECKING:  # a config is checked where there are no ranks
    from gmeta.data.accumulate import MicroBatches
    from gmeta.data.episodes import Episodes
    from gmeta.distributed.optim.optimizers import OuterOptimizer
    from gmeta.distributed.ranks import Ranks
    from gmeta.distributed.stopping import Stop
    from gmeta.learner import MetaLearner


@final
class Run:
    """The run that calls a callback: where it stands, what it trains, and the ways to change it.
    `learner.model` is the model, `optimizer` that of layers and tables."""

    learner: MetaLearner
    optimizer: OuterOptimizer

    def __init__(self, info: RunInfo, ranks: Ranks, stop: Stop) -> None:
        self.info = info
        self.logged: dict[str, list[float | Tensor]] = {}  # since the last reading
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.step = info.done_steps
        self.epoch = 0  # counts from 0
        self._stop = stop

    def stop(self, reason: str) -> None:
        """End the run before one of the next steps, with a checkpoint to resume from; all ranks end
        alike. `reason` says who stops and why, as "Patience: no better in 3 validations"."""
        self._stop.is_requested, self._stop.reason = True, reason

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a value, or a tensor of one, to the next reading, which has the mean over ranks and
        calls. Does not wait for the device."""
        kept = value.detach() if isinstance(value, Tensor) else float(value)
        self.logged.setdefault(name, []).append(kept)

    def set_rates(self, dense_lr: float | None = None, sparse_lr: float | None = None) -> None:
        """Set learning rates for all steps from the next one on, on all ranks alike; what
        outer.lr_schedule scales. Raises ValueError: one is below 0 or not finite."""
        for name, rate in {"dense_lr": dense_lr, "sparse_lr": sparse_lr}.items():
            if rate is None:
                continue
            if not (math.isfinite(rate) and rate >= 0):
                raise ValueError(f"{name} = {rate}: a number from 0 on is needed")
            self.optimizer.full_rates[name] = float(rate)


class Callback:
    """Override the methods you need. Every rank makes one, without arguments, and calls it in the
    same places with the same numbers, unless a method says otherwise. An error ends the run."""

    def on_train_begin(self, run: Run) -> None:
        """Called before the first step."""

    def on_backward(self, run: Run, batch: Episodes | MicroBatches, loss: Tensor) -> None:
        """Called in each step between backward and the layers' update, with this rank's tasks and
        its part of the loss. `weight.grad` of a layer is the mean over all ranks; who changes it
        does so on all ranks alike. Tables have taken their step, unless outer.clip_norm holds it
        back."""

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

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs, as JSON takes it: rank 0's goes into each checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called before `on_train_begin` of a resumed run, with the state of its checkpoint."""

    def on_train_end(self, run: Run, status: Status) -> None:
        """Called after the last step, unless the run failed."""
