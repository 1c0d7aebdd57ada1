"""Training, top to bottom: data -> sharded learner -> steps -> metrics -> checkpoints."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from gmeta.config.train_config import TrainConfig
from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes
from gmeta.data.label_checks import check_first_labels
from gmeta.distributed.collective_errors import gather_stop_reason, run_on_first
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks, broadcast_value
from gmeta.distributed.sharding import describe_sharding, shard_learner
from gmeta.distributed.sharding_plan import describe_in_words
from gmeta.distributed.steps import StepTotals, batch_without_tasks, iterate_steps
from gmeta.distributed.stopping import Stop, StoppedError, stop_on_sigterm
from gmeta.evaluation.predictions import EvalContext
from gmeta.evaluation.validation import score_before_training, score_validation
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.item_statistics_reader import read_item_statistics
from gmeta.feeds.open_source import open_batch_source
from gmeta.feeds.step_agent import iterate_batches, open_agent
from gmeta.feeds.training_sample import fit_to_sample
from gmeta.platform.numerics import choose_products, make_deterministic, seed_step
from gmeta.runs.build import build
from gmeta.runs.checkpoints.beginning import beginning_of
from gmeta.runs.checkpoints.checkpoint_writer import CheckpointWriter
from gmeta.runs.checkpoints.memory.memory_checkpoints import open_memory
from gmeta.runs.checkpoints.progress_file import restore_replaced
from gmeta.runs.early_stop import describe_end, make_early_stop
from gmeta.runs.guards import StepGuard
from gmeta.runs.hang_watch import HangWatch
from gmeta.runs.logging.run_hooks import RunHooks
from gmeta.runs.rank_agreement import check_alike
from gmeta.runs.resolve import describe_skipped_splits, resolve_on_first
from gmeta.runs.run_folder import RunFolder, list_checkpoints, parse_checkpoint_step
from gmeta.runs.run_lock import lock_run_folder
from gmeta.runs.run_progress import is_due
from gmeta.runs.run_start import begin_run
from gmeta.runs.step_meter import StepMeter
from gmeta.runs.step_profiler import StepProfiler


def train(config: TrainConfig, ranks: Ranks) -> RunFolder:
    """Train as `config` says, from the run folder's newest checkpoint if there is one. Raises
    StoppedError: SIGTERM ended it; a checkpoint holds every step."""
    is_resumed, config = config, resolve_on_first(config, ranks)
    if config.run.deterministic:
        make_deterministic()
    choose_products(config.run.precision, ranks.device)
    with ExitStack() as resources:
        resources.callback(torch.set_num_threads, torch.get_num_threads())  # steps choose their own
        run = TrainingRun(
            config, ranks, resources, describe_skipped_splits(is_resumed.data, config.data)
        )
        # Closed from right to left: the source hears of the last checkpoint and of the end.
        with run.feed, run.hooks, run.writer, run.profiler, stop_on_sigterm() as stop:
            run.work(stop)
    return run.folder


@final
class TrainingRun:
    """One rank's part of a run; all ranks make one and call it in the same places."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks, resources: ExitStack, messages: list[str]
    ) -> None:
        """Build the learner, or load it from the newest checkpoint, and make the run folder, which
        is this run's alone until `resources` closes; `messages` are printed as it begins."""
        self._config = config
        self._ranks = ranks
        self.hooks = RunHooks(config, ranks)
        self._dataset, self._learner = build(config)
        of_data = self._dataset.fingerprint
        check_alike({"the fingerprint of data.path": of_data}, ranks)
        # By one rank for all: the first block is not this rank's own part of the data.
        self._batches = batches = BatchSettings.of(config, self._dataset)
        run_on_first(lambda: check_first_labels(batches.split, batches.kinds, self._dataset), ranks)
        self._sharded = shard_learner(self._learner, self._dataset.features, config, ranks)
        self._scored = EvalContext(config, self._dataset, self._sharded, ranks)
        plan = describe_sharding(self._sharded, config.sharding, ranks)
        self._start_messages = [*messages, *describe_in_words(plan)]
        self._optimizer = build_optimizer(self._sharded, config.outer)
        self.folder = RunFolder(Path(config.run.dir))
        # Before checkpoints are listed: no other process changes them from here on.
        run_on_first(lambda: resources.enter_context(lock_run_folder(self.folder.root)), ranks)
        run_on_first(lambda: restore_replaced(self.folder.checkpoints), ranks)
        newest = next(reversed(list_checkpoints(self.folder.checkpoints)), None)
        self._beginning = beginning_of(self.folder, newest, config, self._dataset)
        self._saved_step = parse_checkpoint_step(newest) if newest is not None else 0
        self._memory = open_memory(config, (of_data, plan), self._saved_step, ranks)
        kept = self._memory.find()
        self.feed = open_batch_source(batches, self._dataset, ranks, newest, kept.manifest)
        self._progress = self._beginning.load(config.outer, self._sharded, self._optimizer, ranks)
        self.hooks.show_trained(self._learner, self._optimizer, self._beginning.resumed_from)
        self._start_messages += self._beginning.messages
        self._forecasts = self._beginning.how == "continued" and config.run.prequential
        self._forecasts &= not kept.bodies
        # Of this dataset, whatever weights the run begins with; a forecast may not know its labels.
        if not self._forecasts:
            self._start_messages += self._take_item_statistics()
        if self._beginning.how == "fresh" and config.model.linear_start:
            found = fit_to_sample(self._learner.fit_regression, batches, self._dataset, ranks)
            self._start_messages.append(self._learner.start_as(found))
        self._memory.track(self._sharded, self._optimizer, kept)
        self._progress = kept.progress or self._progress
        self._start_messages += kept.messages
        run_on_first(lambda: begin_run(config, ranks, of_data, plan, self._progress), ranks)

        self._step_limit = config.run.max_steps or sys.maxsize
        self._total_steps = min(self.feed.num_steps * config.run.epochs, self._step_limit)
        self.writer = CheckpointWriter(
            self.folder.checkpoints,
            self._sharded,
            self._optimizer,
            config,
            ranks,
            on_commit=self._confirm_checkpoint,
            lineage=self._beginning.lineage,
        )
        self._early_stop = make_early_stop(config)
        self._guard = StepGuard(
            self.folder.bad_batches, self._learner.parameters(), ranks, ending=self.writer.finish
        )
        self._watch = HangWatch(self.folder, config.run, ranks, lambda: self._progress.step)
        self._meter = StepMeter(ranks, self._watch.pause)
        self.profiler = StepProfiler(self.folder.profile, config.run.profile_steps, ranks)

    def _take_item_statistics(self) -> list[str]:
        learner = self._learner
        return read_item_statistics(
            learner.items, learner.neighbours, self._batches, self._dataset, self._ranks
        )

    def work(self, stop: Stop) -> None:
        """Train epoch after epoch, to the end of the run. Raises StoppedError: SIGTERM ended it."""
        self.hooks.begin(self._progress, self._total_steps, stop, self.feed)
        self.hooks.show_lines(self._start_messages)
        if self._forecasts:
            self._forecast()
            self.hooks.show_lines(self._take_item_statistics())
        self._agent = open_agent(self._batches, self.feed, self._sharded, self._ranks, stop)
        if self._beginning.how == "weights" and self._early_stop.patience:
            # The weights of another run stay this one's best until training makes better ones.
            self._validate(0)
            self._save()
        while self._progress.epoch < self._config.run.epochs and not self._is_run_over():
            with self._watch.watch():
                self._take_steps(stop)
            if stop.is_agreed:
                self.writer.finish()  # what is being written still gets its name
                self._end_early(gather_stop_reason(stop, self._ranks))
                break
            self._end_epoch()
        run, algorithm, num_steps = self._config.run, self._config.algorithm, self.feed.num_steps
        end = describe_end(self._early_stop, self._progress, num_steps, run, algorithm)
        self.hooks.show_lines(end)
        self.profiler.end()
        self.hooks.show_lines(self.profiler.summary_lines())

    def _is_run_over(self) -> bool:
        return self._progress.step >= self._step_limit or self._early_stop.is_over(self._progress)

    def _take_steps(self, stop: Stop) -> None:
        """Take an epoch's steps: stored batches -> augmented -> collated -> enqueued -> a step."""
        local, progress = self._sharded.local, self._progress
        batches = iterate_batches(
            self._batches, self._dataset, self.feed, self._agent, local, progress, stop
        )
        # A rank that runs out of data takes part with a batch that has no tasks.
        idle = batch_without_tasks(self._dataset.features)
        for episodes, totals in iterate_steps(
            batches,
            self._learner.collate(idle, progress.epoch),
            self._ranks,
            stop,
            self._sharded,
            self._watch.beat_before(self._agent.adopt_new_plan),
            lambda: self._optimizer.begin_step(self._progress.step, self._total_steps),
        ):
            loss = self._step(episodes, totals)
            self.feed.report_trained(episodes.task_T.numel())
            self._agent.finish_step(episodes.task_T.numel(), episodes.num_rows)
            self._meter.add(loss, totals.num_rows, totals.terms_per_reported)
            self._after_step()
            if self._is_run_over():
                return

    def _step(self, episodes: Episodes | MicroBatches, totals: StepTotals) -> Tensor:
        """Run forward, backward and update; return the rank's weighted loss."""
        seed_step(self._config.run.seed, self._progress.step, self._ranks.rank)
        # The mean over all ranks' terms: data-parallel averaging divides by the world size.
        weight = self._ranks.world_size / max(totals.num_terms, 1)
        learner = self._sharded.local
        with learner.translate_model_errors():
            loss: Tensor = self._sharded(episodes, weight=weight)
            loss.backward()
        self._guard.watch(self._progress, episodes, loss, learner.exchange.gradient_sum)
        self.hooks.record_gradients(episodes, loss)
        self._optimizer.step()
        self.writer.poll()
        self.profiler.step()
        self._progress = self._progress.after_step()
        self.hooks.record_step(self._progress, loss, episodes.num_rows)
        return loss

    def _after_step(self) -> None:
        run, step = self._config.run, self._progress.step
        # By the steps since the last reading, not by the step: a resumed run begins a new reading.
        if self._meter.steps == run.log_every_steps:
            self._write_reading(self._progress.epoch)
        if is_due(run.valid_every_steps, step):
            self._validate(self._progress.epoch)
        if is_due(run.checkpoint_every_steps, step) or self._is_best():
            self._save()
        self._memory.keep_if_due(
            self._progress, self._saved_step, self.writer.finish, self._files_in_memory
        )

    def _files_in_memory(self) -> Mapping[str, str]:
        self._guard.check()
        return self.feed.checkpoint_files(self._progress.step, in_memory=True)

    def _end_epoch(self) -> None:
        config, epoch = self._config, self._progress.epoch
        epoch_over = self.feed.is_epoch_over(self._progress.epoch_step)
        last = self._is_run_over() or (epoch_over and epoch + 1 == config.run.epochs)
        if last and self._meter.steps:
            self._write_reading(epoch)
        # First: a checkpoint of this step says that training goes on with the next epoch.
        if epoch_over:
            self._progress = self._progress.after_epoch()
        if (
            config.data.valid_splits
            and self._progress.scored_step != self._progress.step
            and (last or not config.run.valid_every_steps)
        ):
            self._validate(epoch)
        over = self._early_stop.is_over(self._progress)
        if last or over or self._is_best() or not config.run.checkpoint_every_steps:
            self._save()

    def _end_early(self, reason: str) -> None:
        if self._meter.steps:
            self._write_reading(self._progress.epoch)
        # Equal where the stop came right behind a checkpoint, or before a resumed run's first step.
        if self._progress.step != self._saved_step:
            self._save()
            self.writer.finish()
        message = (
            f"stopped by {reason or 'SIGTERM'} behind step {self._progress.step}, and nothing of "
            "it is lost. Run the same command with --resume to go on"
        )
        if not reason:
            raise StoppedError(message)
        self.hooks.show_lines([message])

    def _write_reading(self, epoch: int) -> None:
        values = self._meter.read(self.feed.wait_s + self._agent.wait_s) | self._optimizer.reading()
        self.hooks.log(self._progress.step, epoch, values)

    def _save(self) -> None:
        with self._meter.exclude_time():
            # What a NaN led to must not become a checkpoint.
            self._guard.check()
            self.writer.finish()
            files = self.hooks.with_callbacks(self.feed.checkpoint_files(self._progress.step))
            self.writer.save(self._progress, {**files, **self._agent.checkpoint_files()})
        self._saved_step = self._progress.step

    def _confirm_checkpoint(self, checkpoint: Path) -> None:
        self.feed.confirm_checkpoint()
        self._memory.committed = parse_checkpoint_step(checkpoint)
        self.hooks.record_checkpoint(checkpoint)

    def _validate(self, epoch: int) -> None:
        with self._meter.exclude_time():
            self._optimizer.sync()
            scores = score_validation(self._scored, self.hooks.show_lines)
        # Only rank 0 has scores; all must judge alike, or they would part at the next step.
        scores = broadcast_value(scores, self._ranks)
        self.hooks.record_validation(self._progress.step, epoch, scores)
        score = scores.get(self._early_stop.metric)
        self._progress = self._early_stop.update(self._progress, score)

    def _forecast(self) -> None:
        # Before training: the model as it came from the increment before.
        with self._meter.exclude_time():
            self.hooks.show_lines(score_before_training(self._scored, self._beginning.lineage))

    def _is_best(self) -> bool:
        return self._config.run.keep_best and self._progress.is_best
