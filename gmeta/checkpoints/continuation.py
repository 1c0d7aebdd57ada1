"""What a run on the next increment of a stream goes on from, and what it must have in common with
the run before it.
"""

from pathlib import Path

from gmeta.checkpoints.about import read_about, read_progress
from gmeta.checkpoints.choice import check_config, named_checkpoint
from gmeta.checkpoints.lineage import Lineage, lineage_of, skipped_before
from gmeta.checkpoints.resume import changed_optimizers
from gmeta.config import ADAGRADS, OuterConfig, TrainConfig
from gmeta.errors import ConfigError, UserError
from gmeta.outer.early_stop import early_stop_of
from gmeta.runs.folder import RunFolder, list_checkpoints
from metaio.format.dataset import Dataset


def checkpoint_to_continue_from(
    config: TrainConfig, dataset: Dataset
) -> tuple[Path | None, Lineage, list[Dataset]]:
    """Return the checkpoint that a new run goes on from, None if `run.continue_from` is empty, the
    increments that it was trained on, and those that are skipped on the way to `dataset`.

    Raises:
        UserError: there is no checkpoint, its run is not over, `dataset` is not the increment after
            its last but for those skipped, or the config is of another model or optimizer.
        ConfigError: a discount of sums that there are none of; increments to skip, and no run to go
            on from.
        GMetaError: the checkpoint is damaged.
        FormatError: a skipped increment is.
    """
    named, skip = config.run.continue_from, config.run.skip_increments
    if not named:
        if skip:
            raise ConfigError(
                f"run.skip_increments = {list(skip)} has no effect without run.continue_from: a "
                "model that begins anew is trained on data.increment alone. Leave it out"
            )
        return None, (), []
    _check_discount(config.outer)
    folder, checkpoint = named_checkpoint("run.continue_from", named)
    lineage = lineage_of(read_about(checkpoint))
    skipped = skipped_before(lineage, dataset, skip, checkpoint)
    check_config(checkpoint, config)
    before = folder.read_config()
    if folder.root == Path(named):
        _check_over(folder, before)
    _check_as_before(folder, before, config)
    return checkpoint, lineage, skipped


def _check_discount(outer: OuterConfig) -> None:
    """Refuse a discount that nothing would feel: neither optimizer keeps Adagrad's sums."""
    kinds = (outer.dense_optimizer, outer.sparse_optimizer)
    if outer.adagrad_decay < 1.0 and not set(kinds) & set(ADAGRADS):
        raise ConfigError(
            f"outer.adagrad_decay = {outer.adagrad_decay:g}, but neither outer.dense_optimizer = "
            f"{kinds[0]!r} nor outer.sparse_optimizer = {kinds[1]!r} keeps sums of squares. Leave "
            "it 1, or choose one of Adagrad's kinds"
        )


def _check_over(folder: RunFolder, config: TrainConfig) -> None:
    """Refuse a run that has not seen all of its increment: the next one would leave out the rest.
    Whoever names one of its checkpoints instead has chosen so."""
    progress = read_progress(list_checkpoints(folder.checkpoints)[-1])
    run = config.run
    if not (
        progress.epoch >= run.epochs
        or 0 < run.max_steps <= progress.step
        or early_stop_of(config).is_over(progress)
    ):
        raise UserError(
            f"run.continue_from = {str(folder.root)!r} is not over: it stands at step "
            f"{progress.step}, in epoch {progress.epoch + 1} of {run.epochs}. Let it end, with "
            "--resume if it was stopped, or name one of its checkpoints"
        )


def _check_as_before(folder: RunFolder, before: TrainConfig, now: TrainConfig) -> None:
    """Refuse another loss or optimizer, whose state is of no use to this one, and what would give
    new rows other values than the old ones began with."""
    was, asked = before.by_key(), now.by_key()
    optimizers = changed_optimizers(before.outer, now.outer)
    for key in (
        "outer.loss",
        *(f"outer.{name}" for name in optimizers),
        "outer.embedding_init_std",
        "run.seed",
    ):
        if was[key] != asked[key]:
            raise UserError(
                f"{key} = {asked[key]!r}, but run {folder.root}, which run.continue_from "
                f"goes on from, was trained with {was[key]!r}: weights, optimizer state "
                "and new rows would not belong together. Set it as it was"
            )
