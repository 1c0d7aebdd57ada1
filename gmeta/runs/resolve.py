"""Resolves the config of a run, once, on rank 0: what it leaves to its data and to earlier runs."""

import json
from dataclasses import replace
from pathlib import Path

from gmeta.config.train_config import DataConfig, RunConfig, TrainConfig, with_every_option
from gmeta.distributed.collective_errors import run_on_first
from gmeta.distributed.ranks import Ranks, broadcast_value
from gmeta.runs.build import estimate_label_prior, estimate_moments
from gmeta.runs.checkpoints.run_mirror import fetch_run
from gmeta.runs.checkpoints.selected_checkpoint import named_checkpoint
from gmeta.runs.rank_agreement import OF_ONE_MACHINE, check_alike, settings_of_all
from gmeta.runs.resolve_names import config_of_begun_run, with_names
from gmeta.runs.run_folder import COST_FILE, RunFolder, list_checkpoints
from metaio.format.dataset import Dataset


def resolve(config: TrainConfig) -> TrainConfig:
    """Return the config with its increment, label prior, judged label and costs of tasks. Raises
    ConfigError, UserError, FormatError: the stream lacks the increment, or is damaged."""
    # A caller of train() may leave some options out.
    config, dataset = with_names(with_every_option(config))
    data, run = _without_empty_splits(config.data, config.run, dataset)
    data = replace(data, task_cost=_resolve_task_cost(data, run))
    if data.train_split in dataset.splits:
        trained = dataset.splits[data.train_split]
        num_tasks = data.mean_tasks_per_step(trained.num_episodes, trained.num_rows)
        data = replace(data, tasks_per_step=num_tasks)
    config = replace(config, data=data, run=run)
    labels, inputs, split = config.labels, config.support_features, data.train_split
    if labels.standardise and not labels.moments:
        # Weights keep their units; that they have some is checked with the checkpoint.
        before = _read_earlier_config(run)
        kinds = labels.loss_kinds(config.outer.loss, dataset.features.labels)
        known = before.labels.moments if before else ()
        moments = known or estimate_moments(split, kinds, dataset)
        config = replace(config, labels=replace(labels, moments=moments))
    if config.has_support_inputs and not inputs.label_prior and dataset.manifest.stream is not None:
        # The stream's first run decides: another day's prior would change the inputs' meaning.
        before = _read_earlier_config(run)
        known = before.support_features.label_prior if before else ()
        prior = known or tuple(estimate_label_prior(split, config.loss_of(), dataset))
        config = replace(config, support_features=replace(inputs, label_prior=prior))
    return config


def _resolve_task_cost(data: DataConfig, run: RunConfig) -> tuple[float, ...] | str:
    """Return data.task_cost; where it is fitted, the cost in ms that stands in the checkpoint with
    which the run goes on or begins, or, where none was measured yet, the default."""
    if data.task_cost != "fitted":
        return data.task_cost
    checkpoints = list_checkpoints(RunFolder(Path(run.dir)).checkpoints)[-1:]
    for name in ("continue_from", "start_from"):
        if not checkpoints and (named := getattr(run, name)):
            checkpoints = [named_checkpoint(f"run.{name}", named)[1]]
    for file in (checkpoint / COST_FILE for checkpoint in checkpoints):
        if file.exists():
            costs = json.loads(file.read_text())
            return costs["per_task_ms"], costs["per_row_ms"]
    return DataConfig.task_cost


def _read_earlier_config(run: RunConfig) -> TrainConfig | None:
    """Return the config of the run in run.dir, or of the one that a new run begins with."""
    before = config_of_begun_run(run.dir)
    for name in ("continue_from", "start_from"):
        if before is None and (named := getattr(run, name)):
            before = named_checkpoint(f"run.{name}", named)[0].read_config()
    return before


def resolve_on_first(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Collective. Return the config as rank 0 resolves it, after fetching the run from its mirror.
    Raises UserError, on all ranks: one has other settings than rank 0."""
    check_alike(settings_of_all(config.by_key()), ranks)
    # By rank 0 alone: an increment may land in between.
    found = [config]

    def work() -> None:
        fetch_run(config.run.mirror, Path(config.run.dir))
        found.append(resolve(config))

    run_on_first(work, ranks)
    first = broadcast_value(found[-1], ranks)
    # Where the data lies stays each machine's own.
    own = {key.removeprefix("data."): config.by_key()[key] for key in OF_ONE_MACHINE}
    return replace(first, data=replace(first.data, **own))


def describe_skipped_splits(configured: DataConfig, data: DataConfig) -> list[str]:
    """Return the lines on validation splits that `resolve` left out."""
    splits = [name for name in configured.valid_splits if name not in data.valid_splits]
    then = "" if data.valid_splits else ": no validation, no early stopping in this run"
    return [f"split {name} has no task in increment {data.increment}{then}" for name in splits]


def _without_empty_splits(
    data: DataConfig, run: RunConfig, dataset: Dataset
) -> tuple[DataConfig, RunConfig]:
    # A pipeline may get small increments, in which a validation split is empty.
    if dataset.manifest.stream is None:
        return data, run
    splits = tuple(
        name
        for name in data.valid_splits
        if name not in dataset.splits or dataset.splits[name].num_episodes
    )
    if splits == data.valid_splits:
        return data, run
    # Without a score there is nothing to stop early by.
    run = run if splits else replace(run, valid_every_steps=0, early_stop_patience=0)
    return replace(data, valid_split=splits or ""), run
