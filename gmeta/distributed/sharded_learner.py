"""The embedding tables and the layers behind them as one module, as every rank holds it once the
tables are sharded.

Shape suffixes: U unique ids, D embedding width"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel

from gmeta.data.accumulate import Collated, MicroBatches, accumulate_loss
from gmeta.data.episodes import Episodes
from gmeta.distributed.exchange.exchange import Exchange
from gmeta.distributed.ranks import lost_contact
from gmeta.errors import ConfigError, GMetaError, is_of_memory
from gmeta.platform.numerics import autocast
from gmeta.platform.threads import ThreadChoice, work_to_predict
from gmeta_keys.plugins import is_ours
from gmeta_keys.translate_errors import format_foreign_error, translate_errors
from gmeta_models.eval_mode import in_eval_mode

if TYPE_CHECKING:  # which learner is spread over the ranks is its builder's business
    from gmeta.learner import MetaLearner, QueryPrediction


class ComputeClock(Protocol):
    """Measures the time that a rank computes by itself."""

    def start(self, rows_UD: Tensor) -> None:
        """Start to measure: the rows have arrived."""


class ShardedLearner(nn.Module):
    """Tables before a MetaLearner: DistributedModelParallel shards those and copies the rest."""

    def __init__(
        self, tables: nn.Module, learner: "MetaLearner", precision: str = "float32"
    ) -> None:
        super().__init__()
        self.tables = tables
        self.learner = learner
        self._precision = precision
        self._threads = ThreadChoice(torch.get_num_threads())
        self._threads_to_predict = ThreadChoice(torch.get_num_threads())
        # Its start, work and threads; None: something else came since.
        self._last_step: tuple[float, int, int] | None = None
        self._num_weights = sum(parameter.numel() for parameter in learner.parameters())
        self.exchange: Exchange  # set once the tables are sharded
        self.clock: ComputeClock | None = None  # starts when the rows of a step have arrived

    def forward(self, episodes: Episodes | MicroBatches, weight: float) -> Tensor:
        """Return the rank's weighted loss, see MetaLearner.forward; all ranks have one `weight`."""
        if isinstance(episodes, MicroBatches) and self.learner.shares_events:
            raise ConfigError(
                "sharding.sequence has all ranks take part in a step at once, and the data-shard "
                "service has this one take its tasks in parts. Set the service's "
                'controller.max_micro_batch = 0, or sharding.sequence = "none"'
            )
        self._set_threads(episodes.num_rows * self._num_weights)
        episodes, rows_UD = self.fetch(episodes, weight)
        if self.clock is not None:
            self.clock.start(rows_UD)
        with autocast(self._precision, rows_UD.device):
            if isinstance(episodes, MicroBatches):
                return accumulate_loss(self.learner, rows_UD, episodes, weight)
            loss: Tensor = self.learner(rows_UD, episodes, weight)
            return loss

    def translate_model_errors(self) -> translate_errors:
        """Return a context that raises ConfigError for an error of another package's model."""
        return translate_errors(self._translate_error, GMetaError)

    def _translate_error(self, error: Exception) -> Exception:
        kind = type(self.learner.model)
        is_of_device = isinstance(error, torch.AcceleratorError)  # whichever kernel it came from
        if is_ours(kind) or is_of_device or lost_contact(error) or is_of_memory(error):
            return error
        message = (
            f"a step fails in {kind.__module__}:{kind.__qualname__}: "
            f"{format_foreign_error(error)}. Mend it, --verbose shows the line"
        )
        if isinstance(error, RuntimeError):  # as torch raises
            message += '; what has no second derivative learns with algorithm.name = "fomaml"'
        return ConfigError(message)

    def _set_threads(self, work: int) -> None:
        # The time of a step is known only as the next one begins: it ends in the optimizer.
        now = time.perf_counter()
        if self._last_step is not None:
            began, *last = self._last_step
            self._threads.record(now - began, *last)
        threads = self._threads.threads_for(work)
        torch.set_num_threads(threads)
        self._last_step = now, work, threads

    def fetch(self, episodes: Collated, gradient_unit: float = 1.0) -> tuple[Collated, Tensor]:
        """Return the rows [U, D] of `episodes.unique_ids_U`, and the episodes that index them."""
        # Training enqueues ahead of the step; predictions begin here.
        if episodes.fetch is None:
            episodes = self.exchange.enqueue(episodes)
        assert episodes.fetch is not None
        return episodes, episodes.fetch.rows_UD(gradient_unit)

    def predict(self, episodes: Episodes) -> "QueryPrediction":
        """Collective, also without episodes. Return the outputs on the query rows."""
        return self.predict_along(episodes, (self.learner.inner_steps,))[0]

    @torch.no_grad()
    def predict_along(self, episodes: Episodes, steps: Sequence[int]) -> "list[QueryPrediction]":
        """Return what `predict` does after each of these numbers of inner steps. Collective."""
        self._last_step = None
        episodes, rows_UD = self.fetch(episodes)
        work = work_to_predict(episodes.num_rows, self._num_weights, steps[-1])
        chosen = self._threads_to_predict.use_for(work)
        with in_eval_mode(self.learner), chosen, self.translate_model_errors():
            return self.learner.predict_along(rows_UD, episodes, steps)


class DistributedLearner(DistributedModelParallel):  # type: ignore[misc]
    """A ShardedLearner as all ranks hold it: shards of its tables, and copies of its layers."""

    @property
    def local(self) -> ShardedLearner:
        """Return this rank's part, inside the data-parallel wrapper."""
        wrapped = self.module
        # Without other ranks to average with there is no DistributedDataParallel.
        learner: ShardedLearner = wrapped.module if hasattr(wrapped, "module") else wrapped
        return learner
