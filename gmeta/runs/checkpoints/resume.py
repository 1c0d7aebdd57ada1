"""Whether a run can go on from a checkpoint with its config and data, or start from another's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmeta.config.train_config import DataConfig, OuterConfig, RunConfig, TrainConfig
from gmeta.errors import UserError
from gmeta.metrics.catalogue import label_of
from gmeta.runs.checkpoints.progress_file import read_progress
from gmeta.runs.checkpoints.selected_checkpoint import check_config, named_checkpoint
from gmeta.runs.early_stop import make_early_stop, make_scoring
from gmeta.runs.run_folder import CONFIG_FILE, RunFolder
from metaio.format.dataset import Dataset
from metaio.quantities import format_count

# With run.seed these decide which episodes a static step of an epoch holds; the service keeps its
# own account.
ORDER_KEYS = ("train_split", "tasks_per_step", "rows_per_step", "shuffle", "blocks_per_step")


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
    if config.data.valid_splits and progress.best_score is not None:
        was, now = what_decides(before), what_decides(config)
        _check_scores(folder, was, now, progress.best_score)
    # Between epochs the order may change.
    if config.data.source == "static" and progress.epoch_step:
        if gone := folder.gone_keys("data"):
            raise UserError(
                f"run {folder.root} stands {format_count(progress.epoch_step, 'step')} into an "
                f"epoch in an order that is no more: {gone[0]}. Begin a new run with the weights: "
                f"add run.start_from={folder.root} and choose another run.dir"
            )
        was, now = (_order_of(one.data, one.run.seed) for one in (before, config))
        _check_order(folder, was, now, progress.epoch_step)


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
    folder: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any], best: float
) -> None:
    # The best score so far compares with no other metric or split.
    for key, previous in before.items():
        if previous != now[key]:
            raise UserError(
                f"{key} = {now[key]!r}, but run {folder.root} holds its best {previous!r} so far "
                f"({best:.4g}), with which no other can be compared. Set it as it "
                f"was, or begin a new run with the weights: add run.start_from={folder.root} and "
                "choose another run.dir"
            )


def what_decides(config: TrainConfig) -> dict[str, Any]:
    """Return the metric, splits and least positive label (None: not used) that decide, by key."""
    metric = make_early_stop(config).metric
    name, label = label_of(metric)
    return {
        "run.early_stop_metric": metric,
        "data.valid_split": config.data.valid_split,
        "evaluation.positive_rating": make_scoring(config, label).threshold_of(name),
    }


def _order_of(data: DataConfig, seed: int) -> dict[str, Any]:
    return {**{f"data.{key}": getattr(data, key) for key in ORDER_KEYS}, "run.seed": seed}


def _check_order(
    folder: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any], epoch_step: int
) -> None:
    for name in before:
        if before[name] != now[name]:
            raise UserError(
                f"{name} = {now[name]!r}, but run {folder.root} stands "
                f"{format_count(epoch_step, 'step')} into an epoch that began with "
                f"{before[name]!r}: the rest of it would train some episodes twice and "
                "others never. Set it as it was until the epoch is over, or choose another run.dir"
            )


def find_start_checkpoint(run: RunConfig, dataset: Dataset) -> Path | None:
    """Return the checkpoint whose weights a new run begins with; None without `run.start_from`.
    Raises GMetaError: it was trained on another dataset."""
    if not run.start_from:
        return None
    folder, found = named_checkpoint("run.start_from", run.start_from)
    folder.check_dataset(dataset.url, dataset.fingerprint)
    return found
