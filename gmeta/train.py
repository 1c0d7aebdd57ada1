"""Training, top to bottom: data -> sharded learner -> steps -> metrics -> checkpoints.

Every rank runs this; what differs between them is inside `parallel` and the feed.
"""

import sys
from dataclasses import replace
from pathlib import Path

from gmeta.agent import open_agent
from gmeta.augment import augmented
from gmeta.build import build
from gmeta.checkpoint import list_checkpoints, load_checkpoint
from gmeta.checkpoint_writer import CheckpointWriter
from gmeta.config import TrainConfig
from gmeta.early_stop import early_stop_of
from gmeta.evaluate import score_split
from gmeta.feed import open_feed
from gmeta.guards import StepGuard
from gmeta.numerics import make_deterministic
from gmeta.optimizers import build_optimizer
from gmeta.parallel import (
    Ranks,
    barrier,
    described_plan,
    in_step,
    local_learner,
    plan_lines,
    shard_learner,
    value_of_first,
)
from gmeta.profiler import StepProfiler
from gmeta.progress import Progress
from gmeta.run_folder import RunFolder, create_run_folder, keep_metrics_up_to, write_json
from gmeta.run_log import RunLog, StepMeter
from gmeta.stopping import StoppedError, stop_on_sigterm


def is_due(every_steps: int, step: int) -> bool:
    """Whether something that happens after so many steps (0: never) happens now."""
    return every_steps > 0 and step % every_steps == 0


def train(config: TrainConfig, ranks: Ranks) -> RunFolder:
    """Train as `config` says; goes on from the newest checkpoint where the run folder holds one.

    Raises:
        StoppedError: SIGTERM asked a rank to stop; a checkpoint holds every step that was done.
    """
    if config.run.deterministic:
        make_deterministic()
    dataset, learner = build(config)
    sharded = shard_learner(learner, dataset.features, config, ranks)
    plan = described_plan(sharded, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    folder = RunFolder(Path(config.run.dir))
    progress = Progress()
    checkpoints = list_checkpoints(folder.checkpoints)
    newest = checkpoints[-1] if checkpoints else None
    feed = open_feed(config, dataset, ranks, newest)
    if newest is not None:
        progress = load_checkpoint(newest, sharded, optimizer, ranks)
    if ranks.rank == 0:
        create_run_folder(config, ranks.world_size, dataset.fingerprint)
        write_json(folder.plan, plan)
        keep_metrics_up_to(folder, progress.step)
    barrier(ranks)

    step_limit = config.run.max_steps or sys.maxsize
    total_steps = min(feed.num_steps * config.run.epochs, step_limit)

    writer = CheckpointWriter(
        folder.checkpoints, sharded, optimizer, config, ranks, committed=feed.committed
    )
    early_stop = early_stop_of(config)
    guard = StepGuard(folder.bad_batches, learner.parameters(), ranks, ending=writer.finish)
    saved_step = progress.step

    def save() -> None:
        nonlocal saved_step
        guard.check()
        writer.finish()
        writer.save(progress, feed.checkpoint_files(progress.step))
        saved_step = progress.step

    def validate(epoch: int) -> None:
        nonlocal progress
        scores = score_split(config, dataset, config.data.valid_split, sharded, ranks)
        log.write(progress.step, epoch, {"valid": scores})
        score = value_of_first(scores.get(early_stop.metric), ranks)
        progress = early_stop.judged(progress, score)

    def is_best() -> bool:
        return config.run.keep_best and progress.step == progress.scored_step == progress.best_step

    meter = StepMeter(ranks)
    with (
        RunLog(folder, ranks, total_steps, progress.step) as log,
        feed,
        writer,
        StepProfiler(folder.profile, config.run.profile_steps, ranks) as profiler,
        stop_on_sigterm() as stop,
    ):
        log.tell(plan_lines(plan))
        agent = open_agent(config, feed, sharded, learner.arrange, ranks, stop)
        while (
            progress.epoch < config.run.epochs
            and progress.step < step_limit
            and not early_stop.is_over(progress)
        ):
            batches = augmented(
                feed.batches(progress.epoch, progress.epoch_step),
                config.augment,
                dataset.features,
                config.run.seed,
                progress.epoch,
                progress.epoch_step,
            )
            for episodes, totals in in_step(
                batches,
                agent.arrange,
                dataset.features,
                ranks,
                stop,
                sharded,
                agent.take_replanned,
            ):
                optimizer.begin_step(progress.step, total_steps)
                # The mean over all ranks' terms: data-parallel averaging divides by the world size.
                loss = sharded(episodes, weight=ranks.world_size / max(totals.num_terms, 1))
                loss.backward()
                guard.watch(progress, episodes, loss, local_learner(sharded).rows_finite)
                optimizer.step()
                writer.poll()
                profiler.step()

                num_tasks = episodes.task_T.numel()
                feed.trained(num_tasks)
                agent.stepped(num_tasks)
                progress = replace(
                    progress, step=progress.step + 1, epoch_step=progress.epoch_step + 1
                )
                meter.add(loss, totals)
                if meter.steps == config.run.log_every_steps:
                    log.write(progress.step, progress.epoch, meter.read(feed.wait_s))
                if is_due(config.run.valid_every_steps, progress.step):
                    validate(progress.epoch)
                if is_due(config.run.checkpoint_every_steps, progress.step) or is_best():
                    save()
                if progress.step == step_limit or early_stop.is_over(progress):
                    break
            if stop.agreed:
                if meter.steps:
                    log.write(progress.step, progress.epoch, meter.read(feed.wait_s))
                if progress.step != saved_step:
                    save()
                writer.finish()
                raise StoppedError(
                    f"stopped by SIGTERM behind step {progress.step}, and nothing of it is lost. "
                    "Run the same command with --resume to go on"
                )
            epoch, epoch_over = progress.epoch, feed.epoch_over(progress.epoch_step)
            last = (
                progress.step == step_limit
                or (epoch_over and epoch + 1 == config.run.epochs)
                or early_stop.is_over(progress)
            )
            if last and meter.steps:
                log.write(progress.step, epoch, meter.read(feed.wait_s))
            if epoch_over:
                progress = replace(progress, epoch=epoch + 1, epoch_step=0)
            if (
                config.data.valid_split
                and progress.scored_step != progress.step
                and (last or not config.run.valid_every_steps)
            ):
                validate(epoch)
            if (
                last
                or early_stop.is_over(progress)
                or is_best()
                or not config.run.checkpoint_every_steps
            ):
                save()
        if early_stop.is_over(progress):
            log.tell([early_stop.told(progress)])
        profiler.end()
        log.tell(profiler.told())
    return folder
