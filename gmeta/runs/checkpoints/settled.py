"""Resolves what the data decides of a config before a run begins: the increment of a stream, the
label prior of its inputs, and the judged label."""

from dataclasses import replace

from gmeta.config.train_config import TrainConfig
from gmeta.distributed.collective_errors import run_on_first
from gmeta.distributed.ranks import Ranks, broadcast_value
from gmeta.runs.build import estimate_label_prior
from gmeta.runs.checkpoints.choice import named_checkpoint
from gmeta.runs.checkpoints.named import config_of_begun_run, with_names
from metaio.format.dataset import Dataset


def settled(config: TrainConfig) -> TrainConfig:
    """Return the config with its increment, label prior and judged label. Raises ConfigError,
    UserError, FormatError: the stream lacks the increment, or is damaged."""
    config, dataset = with_names(config)
    config, inputs = _validated(config, dataset), config.support_features
    if not inputs.is_used or inputs.label_prior:
        return config
    if dataset.manifest.stream is None:
        return config
    before = config_of_begun_run(config)
    if before is None and config.run.continue_from:
        before = named_checkpoint("run.continue_from", config.run.continue_from)[0].read_config()
    # The stream's first run decides: another day's prior would change the inputs' meaning.
    known = before.support_features.label_prior if before else ()
    prior = known or tuple(estimate_label_prior(config, dataset))
    return replace(config, support_features=replace(inputs, label_prior=prior))


def settled_by_first(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Return the config as rank 0 resolves it. Collective."""
    # By rank 0 alone: an increment may land in between. Paths of the data stay each machine's own.
    found = [config]
    run_on_first(lambda: found.append(settled(config)), ranks)
    first = found[-1]
    data, run, inputs, labels = broadcast_value(
        (
            (first.data.increment, first.data.valid_split),
            (first.run.valid_every_steps, first.run.early_stop_patience),
            first.support_features,
            first.labels,
        ),
        ranks,
    )
    return replace(
        config,
        data=replace(config.data, increment=data[0], valid_split=data[1]),
        run=replace(config.run, valid_every_steps=run[0], early_stop_patience=run[1]),
        support_features=inputs,
        labels=labels,
    )


def passed_over(asked: TrainConfig, config: TrainConfig) -> list[str]:
    """Return the lines on validation splits that `settled` left out."""
    splits = [name for name in asked.data.valid_splits if name not in config.data.valid_splits]
    then = "" if config.data.valid_splits else ": no validation, no early stopping in this run"
    increment = config.data.increment
    return [f"split {name} has no task in increment {increment}{then}" for name in splits]


def _validated(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    data = config.data
    if dataset.manifest.stream is None:
        return config
    splits = tuple(
        name
        for name in data.valid_splits
        if name not in dataset.splits or dataset.splits[name].num_episodes
    )
    if splits == data.valid_splits:
        return config
    # Without a score there is nothing to stop early by.
    run = config.run if splits else replace(config.run, valid_every_steps=0, early_stop_patience=0)
    return replace(config, data=replace(data, valid_split=splits or ""), run=run)
