"""From a config to the reader of a rank's share of a split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.errors import ConfigError
from metaio.read.equal_cost import TaskCost
from metaio.read.reader import BatchReader

if TYPE_CHECKING:
    from gmeta.config.train_config import DataConfig
    from metaio.format.dataset import Dataset


def task_cost_of(data: DataConfig) -> TaskCost:
    """Return what an episode costs. Raises ConfigError: data.task_cost is not resolved, or no cost
    of a task and of a row."""
    given = data.task_cost
    is_cost = len(given) == 2 and not isinstance(given, str) and min(given) >= 0 < max(given)
    if isinstance(given, str) or not is_cost:
        raise ConfigError(
            f"data.task_cost = {given!r} is no cost: two numbers are allowed, that of a task and "
            'that of each of its rows, none below 0 and one above, or "fitted". Correct it, or '
            "remove the key"
        )
    return TaskCost(*given)


def open_reader(
    data: DataConfig, seed: int, dataset: Dataset, split: str, rank: int, world_size: int
) -> BatchReader:
    """Return the reader of a rank's share of a split. Raises ConfigError: the config's order of the
    training split contradicts itself, or does not suit the number of ranks."""
    training = split == data.train_split
    cost = task_cost_of(data)
    try:
        return BatchReader(
            dataset,
            split,
            tasks_per_step=data.tasks_per_step,
            rank=rank,
            world_size=world_size,
            seed=seed,
            # Only training shuffles: evaluations read a split as it is stored.
            shuffle=training and data.shuffle,
            blocks_per_step=data.blocks_per_step if training else 0,
            rows_per_step=data.rows_per_step if training else 0,
            cost=cost,
            threads=data.threads,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
