"""Whether a run can go on from a checkpoint with its config and data, or start from another's."""

from pathlib import Path

from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.errors import UserError
from gmeta.metrics.catalogue import label_of
from gmeta.runs.checkpoints.choice import check_config, named_checkpoint
from gmeta.runs.checkpoints.progress_file import read_progress
from gmeta.runs.early_stop import make_early_stop, make_scoring
from gmeta.runs.run_folder import CONFIG_FILE, RunFolder
from gmeta.runs.run_progress import RunProgress
from metaio.format.dataset import Dataset
from metaio.quantities import format_count

# These decide which episodes a static step of an epoch holds; the service keeps its own account.
ORDER_KEYS = (
    "data.train_split",
    "data.tasks_per_step",
    "data.shuffle",
    "data.lanes",
    "data.window_blocks",
    "data.blocks_per_step",
    "data.drop_last",
    "run.seed",
)


def check_resumable(
    folder: RunFolder, checkpoint: Path, config: TrainConfig, dataset: Dataset
) -> None:
    """Raise UserError for a change of model, algorithm, loss, optimizer, score or the order of a
    half-done epoch, GMetaError for another dataset."""
    # Else some episodes would be trained twice and others never, ids would change their meaning, or
    # optimizer state would be lost. A run folder without a config is not checked.
    if folder.trained_on():
        folder.check_dataset(dataset.url, dataset.fingerprint)
    check_config(checkpoint, config)
    if not (folder.root / CONFIG_FILE).exists():
        return
    before, progress = folder.read_config(), read_progress(checkpoint)
    _check_training(folder, before.outer, config.outer)
    _check_scores(folder, before, config, progress)
    # Between epochs the order may change.
    if config.data.source == "static" and progress.epoch_step:
        _check_order(folder, before, config, progress.epoch_step)


def _check_training(folder: RunFolder, before: OuterConfig, now: OuterConfig) -> None:
    # torch would drop the optimizer state that it does not know.
    changed = dict.fromkeys(
        find_changed_optimizer_keys(before, now), ", whose state is of no use to the other"
    )
    if before.loss != now.loss:
        why = ": the state of its optimizers and its metrics are of no use to the other"
        changed = {"loss": why}
    for key, why in changed.items():
        raise UserError(
            f"outer.{key} = {getattr(now, key)!r}, but run {folder.root} was trained with "
            f"{getattr(before, key)!r}{why}. Set it as it was, or begin a new run with the weights "
            f"alone: add run.start_from={folder.root} and choose another run.dir"
        )


def find_changed_optimizer_keys(before: OuterConfig, now: OuterConfig) -> list[str]:
    """Return the keys by which an optimizer would keep another state than before."""
    # AdamW keeps Adam's.
    previous, requested = (
        outer.dense_optimizer.replace("adamw", "adam") for outer in (before, now)
    )
    is_other = {
        "dense_optimizer": previous != requested,
        "momentum": (before.momentum > 0) != (now.momentum > 0),
        "sparse_optimizer": before.sparse_optimizer != now.sparse_optimizer,
    }
    return [key for key, changed in is_other.items() if changed]


def _check_scores(
    folder: RunFolder, before: TrainConfig, now: TrainConfig, progress: RunProgress
) -> None:
    # The best score so far compares with no other metric or split.
    if progress.best_score is None or not now.data.valid_splits:
        return  # there is nothing to compare
    for key, previous, requested in (
        ("run.early_stop_metric", make_early_stop(before).metric, make_early_stop(now).metric),
        ("data.valid_split", before.data.valid_split, now.data.valid_split),
        (
            "evaluation.positive_rating",
            _find_positive_threshold(before),
            _find_positive_threshold(now),
        ),
    ):
        if previous != requested:
            raise UserError(
                f"{key} = {requested!r}, but run {folder.root} holds its best {previous!r} so far "
                f"({progress.best_score:.4g}), with which no other can be compared. Set it as it "
                f"was, or begin a new run with the weights: add run.start_from={folder.root} and "
                "choose another run.dir"
            )


def _find_positive_threshold(config: TrainConfig) -> float | None:
    name, label = label_of(make_early_stop(config).metric)
    return make_scoring(config, label).threshold_of(name)


def _check_order(
    folder: RunFolder, config_before: TrainConfig, config: TrainConfig, epoch_step: int
) -> None:
    before, now = config_before.by_key(), config.by_key()
    for name in ORDER_KEYS:
        if before[name] != now[name]:
            raise UserError(
                f"{name} = {now[name]!r}, but run {folder.root} stands "
                f"{format_count(epoch_step, 'step')} into an epoch that began with "
                f"{before[name]!r}: the rest of it would train some episodes twice and "
                "others never. Set it as it was until the epoch is over, or choose another run.dir"
            )


def find_start_checkpoint(config: TrainConfig, dataset: Dataset) -> Path | None:
    """Return the checkpoint whose weights a new run begins with; None without `run.start_from`.
    Raises GMetaError: it was trained on another dataset."""
    if not config.run.start_from:
        return None
    folder, found = named_checkpoint("run.start_from", config.run.start_from)
    folder.check_dataset(dataset.url, dataset.fingerprint)
    return found
