"""Training, top to bottom: data -> sharded learner -> steps -> metrics -> checkpoints.

Every rank runs this; what differs between them is inside `parallel` and the feed.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gmeta.batches.accumulate import MicroBatches
from gmeta.batches.episodes import Episodes
from gmeta.batches.labels import check_first_labels
from gmeta.build import all_plugins_of, build
from gmeta.checkpoints.about import restore_replaced
from gmeta.checkpoints.beginning import beginning_of
from gmeta.checkpoints.writer import CheckpointWriter
from gmeta.config import TrainConfig
from gmeta.feeds.agent import arranged_batches, open_agent
from gmeta.feeds.asked import BatchSettings
from gmeta.feeds.source import open_feed
from gmeta.feeds.training_sums import take_item_statistics
from gmeta.guards import StepGuard
from gmeta.hooks.run_hooks import RunHooks
from gmeta.numerics import choose_products, make_deterministic, seed_step
from gmeta.outer.early_stop import early_stop_of
from gmeta.outer.optimizers import build_optimizer
from gmeta.parallel.plan import plan_lines
from gmeta.parallel.ranks import Ranks, value_of_first
from gmeta.parallel.sharded_learner import local_learner
from gmeta.parallel.sharding import described_plan, shard_learner
from gmeta.parallel.steps import StepTotals, in_step
from gmeta.parallel.stopping import Stop, StoppedError, stop_on_sigterm
from gmeta.parallel.together import by_first, no_tasks, why_stopped
from gmeta.predictions import Scored
from gmeta.resolve import passed_over, resolve_on_first
from gmeta.runs.alike import check_alike
from gmeta.runs.environment import describe_environment
from gmeta.runs.folder import (
    RunFolder,
    create_run_folder,
    keep_metrics_up_to,
    list_checkpoints,
    write_json,
)
from gmeta.runs.lock import held_alone
from gmeta.runs.meter import StepMeter
from gmeta.runs.profiler import StepProfiler
from gmeta.runs.progress import is_due
from gmeta.validation import forecast, score_validation


def train(config: TrainConfig, ranks: Ranks) -> RunFolder:
    """Train as `config` says, from the run folder's newest checkpoint if there is one.

    Raises:
        StoppedError: SIGTERM asked a rank to stop; a checkpoint holds every step that was done.
    """
    asked, config = config, resolve_on_first(config, ranks)
    if config.run.deterministic:
        make_deterministic()
    choose_products(config.run.precision, ranks.device)
    with ExitStack() as held:
        held.callback(torch.set_num_threads, torch.get_num_threads())  # steps choose their own
        run = TrainingRun(config, ranks, held, passed_over(asked.data, config.data))
        # Closed from right to left: the feed hears of the last checkpoint before it closes.
        with run.hooks, run.feed, run.writer, run.profiler, stop_on_sigterm() as stop:
            run.work(stop)
    return run.folder


@final
class TrainingRun:
    """One rank's part of a run; all ranks make one and call it in the same places."""

    def __init__(self, config: TrainConfig, ranks: Ranks, held: ExitStack, told: list[str]) -> None:
        """Build the learner, or take it from the newest checkpoint, and make the run folder, which
        is this run's alone until `held` closes; lines of `told` are printed as it begins."""
        self._config = config
        self._ranks = ranks
        self.hooks = RunHooks(config, ranks)
        self._dataset, self._learner = build(config)
        check_alike({"the fingerprint of data.path": self._dataset.fingerprint}, ranks)
        # By one rank for all: what it reads is not its own part of the data.
        self._batches = batches = BatchSettings.of(config, self._dataset)
        by_first(lambda: check_first_labels(batches.split, batches.kinds, self._dataset), ranks)
        self._sharded = shard_learner(self._learner, self._dataset.features, config, ranks)
        self._scored = Scored(config, self._dataset, self._sharded, ranks)
        plan = described_plan(self._sharded, ranks)
        self._told_at_start = [*told, *plan_lines(plan)]
        self._optimizer = build_optimizer(self._sharded, config.outer)
        self.folder = RunFolder(Path(config.run.dir))
        by_first(lambda: held.enter_context(held_alone(self.folder.root)), ranks)
        by_first(lambda: restore_replaced(self.folder.checkpoints), ranks)
        newest = next(reversed(list_checkpoints(self.folder.checkpoints)), None)
        self._beginning = beginning_of(self.folder, newest, config, self._dataset)
        self.feed = open_feed(batches, self._dataset, ranks, newest)
        self._progress = self._beginning.load(config.outer, self._sharded, self._optimizer, ranks)
        self._told_at_start += self._beginning.told
        self._forecasts = self._beginning.how == "continued" and config.run.prequential
        # Of this dataset, whatever weights the run begins with; a forecast may not know its labels.
        if not self._forecasts:
            self._told_at_start += self._take_item_statistics()
        by_first(lambda: self._describe_run(plan), ranks)

        self._step_limit = config.run.max_steps or sys.maxsize
        self._total_steps = min(self.feed.num_steps * config.run.epochs, self._step_limit)
        self.writer = CheckpointWriter(
            self.folder.checkpoints,
            self._sharded,
            self._optimizer,
            config,
            ranks,
            committed=self._committed,
            lineage=self._beginning.lineage,
        )
        self._saved_step = self._progress.step
        self._early_stop = early_stop_of(config)
        self._guard = StepGuard(
            self.folder.bad_batches, self._learner.parameters(), ranks, ending=self.writer.finish
        )
        self._meter = StepMeter(ranks)
        self.profiler = StepProfiler(self.folder.profile, config.run.profile_steps, ranks)

    def _take_item_statistics(self) -> list[str]:
        return take_item_statistics(self._learner.items, self._batches, self._dataset, self._ranks)

    def _describe_run(self, plan: dict[str, Any]) -> None:
        """Make the run folder, or bring it to where the checkpoint stands."""
        fingerprint, plugins = self._dataset.fingerprint, all_plugins_of(self._config)
        ran_on = describe_environment(self._ranks.world_size, fingerprint, plugins)
        create_run_folder(self._config, ran_on)
        write_json(self.folder.plan, plan)
        # Steps beyond the checkpoint are taken, and logged, again.
        keep_metrics_up_to(self.folder, self._progress.step)

    def work(self, stop: Stop) -> None:
        """Train epoch after epoch, to the end of the run.

        Raises:
            StoppedError: SIGTERM asked a rank to stop.
        """
        self.hooks.begin(self._progress, self._total_steps, stop, self.feed.loggers)
        self.hooks.tell(self._told_at_start)
        if self._forecasts:
            self._forecast()
            self.hooks.tell(self._take_item_statistics())
        self._agent = open_agent(self._batches, self.feed, self._sharded, self._ranks, stop)
        while self._progress.epoch < self._config.run.epochs and not self._steps_are_over():
            self._take_steps(stop)
            if stop.agreed:
                self.writer.finish()  # what is being written still gets its name
                self._leave(why_stopped(stop, self._ranks))
                break
            self._end_epoch()
        if self._early_stop.is_over(self._progress):
            self.hooks.tell([self._early_stop.told(self._progress)])
        self.profiler.end()
        self.hooks.tell(self.profiler.told())

    def _steps_are_over(self) -> bool:
        """Return whether the run ends here, wherever in its epoch it is."""
        return self._progress.step >= self._step_limit or self._early_stop.is_over(self._progress)

    def _take_steps(self, stop: Stop) -> None:
        """Take the steps of an epoch, until it ends, or the run does.

        stored batches -> augmented -> arranged episodes -> announced to all ranks -> a step.
        """
        for episodes, totals in in_step(
            arranged_batches(
                self._batches,
                self._dataset,
                self.feed,
                self._agent,
                local_learner(self._sharded),
                self._progress,
                stop,
            ),
            self._learner.arrange(no_tasks(self._dataset.features), self._progress.epoch),
            self._ranks,
            stop,
            self._sharded,
            self._agent.take_replanned,
            lambda: self._optimizer.begin_step(self._progress.step, self._total_steps),
        ):
            loss = self._step(episodes, totals)
            num_tasks = episodes.task_T.numel()
            self.feed.trained(num_tasks)
            self._agent.stepped(num_tasks)
            self._meter.add(loss, totals.num_rows, totals.terms_per_shown)
            self._after_step()
            if self._steps_are_over():
                return

    def _step(self, episodes: Episodes | MicroBatches, totals: StepTotals) -> Tensor:
        """Run forward, backward and update; return the rank's weighted loss."""
        seed_step(self._config.run.seed, self._progress.step, self._ranks.rank)
        # The mean over all ranks' terms: data-parallel averaging divides by the world size.
        weight = self._ranks.world_size / max(totals.num_terms, 1)
        learner = local_learner(self._sharded)
        with learner.model_told():
            loss: Tensor = self._sharded(episodes, weight=weight)
            loss.backward()
        self._guard.watch(self._progress, episodes, loss, learner.exchange.gradient_sum)
        self._optimizer.step()
        self.writer.poll()
        self.profiler.step()
        step, epoch_step = self._progress.step + 1, self._progress.epoch_step + 1
        self._progress = replace(self._progress, step=step, epoch_step=epoch_step)
        self.hooks.stepped(self._progress, loss)
        return loss

    def _after_step(self) -> None:
        """Log, validate and save what is due after this step."""
        run, step = self._config.run, self._progress.step
        if self._meter.steps == run.log_every_steps:
            self._write_reading(self._progress.epoch)
        if is_due(run.valid_every_steps, step):
            self._validate(self._progress.epoch)
        if is_due(run.checkpoint_every_steps, step) or self._is_best():
            self._save()

    def _end_epoch(self) -> None:
        """Log, validate and save what is due after the last step of an epoch, or of the run."""
        config, epoch = self._config, self._progress.epoch
        epoch_over = self.feed.epoch_over(self._progress.epoch_step)
        last = self._steps_are_over() or (epoch_over and epoch + 1 == config.run.epochs)
        if last and self._meter.steps:
            self._write_reading(epoch)
        if epoch_over:
            self._progress = replace(self._progress, epoch=epoch + 1, epoch_step=0)
        if (
            config.data.valid_splits
            and self._progress.scored_step != self._progress.step
            and (last or not config.run.valid_every_steps)
        ):
            self._validate(epoch)
        if (
            last
            or self._early_stop.is_over(self._progress)
            or self._is_best()
            or not config.run.checkpoint_every_steps
        ):
            self._save()

    def _leave(self, reason: str) -> None:
        """Save every step that was done, and end the run: for a callback's reason, or SIGTERM."""
        if self._meter.steps:
            self._write_reading(self._progress.epoch)
        # Equal where the stop came right behind a checkpoint, or before a resumed run's first step.
        if self._progress.step != self._saved_step:
            self._save()
            self.writer.finish()
        told = (
            f"stopped by {reason or 'SIGTERM'} behind step {self._progress.step}, and nothing of "
            "it is lost. Run the same command with --resume to go on"
        )
        if not reason:
            raise StoppedError(told)
        self.hooks.tell([told])

    def _write_reading(self, epoch: int) -> None:
        values = self._meter.read(self.feed.wait_s + self._agent.wait_s) | self._optimizer.reading()
        self.hooks.log(self._progress.step, epoch, values)

    def _save(self) -> None:
        with self._meter.paused():
            # What a NaN led to must not become a checkpoint.
            self._guard.check()
            self.writer.finish()
            self.writer.save(self._progress, self.feed.checkpoint_files(self._progress.step))
        self._saved_step = self._progress.step

    def _committed(self, checkpoint: Path) -> None:
        """Tell who waits for it that a checkpoint has its name."""
        self.feed.committed()
        self.hooks.checkpointed(checkpoint)

    def _validate(self, epoch: int) -> None:
        with self._meter.paused():
            scores = score_validation(self._scored, self.hooks.tell)
        # Only rank 0 has scores; all must judge alike, or they would part at the next step.
        scores = value_of_first(scores, self._ranks)
        self.hooks.validated(self._progress.step, epoch, scores)
        score = scores.get(self._early_stop.metric)
        self._progress = self._early_stop.judged(self._progress, score)

    def _forecast(self) -> None:
        """Score the increment that is trained next, with the model as it came from the last."""
        with self._meter.paused():
            self.hooks.tell(forecast(self._scored, self._beginning.lineage))

    def _is_best(self) -> bool:
        return self._config.run.keep_best and self._progress.is_best
