"""Training, top to bottom: data -> sharded learner -> steps -> metrics -> checkpoints.

Every rank runs this; what differs between them is inside `parallel` and the reader's share of each
step.
"""

from dataclasses import replace
from pathlib import Path

from gmeta.augment import augmented
from gmeta.build import build, open_reader
from gmeta.checkpoint import Progress, list_checkpoints, load_checkpoint, save_checkpoint
from gmeta.config import TrainConfig
from gmeta.evaluate import score_split
from gmeta.optimizers import build_optimizer
from gmeta.parallel import Ranks, barrier, in_step, shard_learner
from gmeta.run_folder import RunFolder, create_run_folder, keep_metrics_up_to
from gmeta.run_log import RunLog, StepMeter


def train(config: TrainConfig, ranks: Ranks) -> RunFolder:
    """Train as `config` says; goes on from the newest checkpoint where the run folder holds one."""
    dataset, learner = build(config)
    sharded = shard_learner(learner, dataset.features, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    reader = open_reader(config, dataset, config.data.train_split, ranks.rank, ranks.world_size)
    epoch_steps = reader.num_steps()
    total_steps = epoch_steps * config.run.epochs
    if config.run.max_steps:
        total_steps = min(total_steps, config.run.max_steps)

    folder = RunFolder(Path(config.run.dir))
    progress = Progress()
    checkpoints = list_checkpoints(folder.checkpoints)
    if checkpoints:
        progress = load_checkpoint(checkpoints[-1], sharded, optimizer, ranks)
    if ranks.rank == 0:
        create_run_folder(config, ranks.world_size, dataset.fingerprint)
        keep_metrics_up_to(folder, progress.step)
    barrier(ranks)

    def save() -> None:
        save_checkpoint(
            folder.checkpoints, progress, sharded, optimizer, ranks, config.run.keep_last
        )

    meter = StepMeter(ranks)
    with RunLog(folder, ranks, total_steps, progress.step) as log, reader:
        while progress.step < total_steps:
            batches = augmented(
                reader.batches(progress.epoch, first_step=progress.epoch_step),
                config.augment,
                dataset.features,
                config.run.seed,
                progress.epoch,
                progress.epoch_step,
            )
            for episodes, totals in in_step(batches, learner.arrange, dataset.features, ranks):
                optimizer.begin_step(progress.step, total_steps)
                # The mean over all ranks' terms: data-parallel averaging divides by the world size.
                loss = sharded(episodes, weight=ranks.world_size / max(totals.num_terms, 1))
                loss.backward()
                optimizer.step()

                progress = replace(
                    progress, step=progress.step + 1, epoch_step=progress.epoch_step + 1
                )
                meter.add(loss, totals)
                finished = progress.step == total_steps
                if finished or meter.steps == config.run.log_every_steps:
                    log.write(progress.step, progress.epoch, meter.read(reader.wait_s))
                if (
                    config.run.checkpoint_every_steps
                    and progress.step % config.run.checkpoint_every_steps == 0
                ):
                    save()
                if finished:
                    break
            if config.data.valid_split:
                scores = score_split(config, dataset, config.data.valid_split, sharded, ranks)
                log.write(progress.step, progress.epoch, {"valid": scores})
            if progress.epoch_step >= epoch_steps:
                progress = Progress(step=progress.step, epoch=progress.epoch + 1)
            if progress.step == total_steps or not config.run.checkpoint_every_steps:
                save()
    return folder
