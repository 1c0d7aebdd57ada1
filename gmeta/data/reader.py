"""From a config to what reads a split for a rank. Knows nothing of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.errors import ConfigError
from metaio.read.reader import BatchReader

if TYPE_CHECKING:
    from gmeta.config.train_config import DataConfig
    from metaio.format.dataset import Dataset


def open_reader(
    data: DataConfig, seed: int, dataset: Dataset, split: str, rank: int, world_size: int
) -> BatchReader:
    """Return the reader of a rank's share of a split: the training split in the config's order,
    others as stored. Raises ConfigError: the order contradicts itself, or does not suit the number
    of ranks."""
    training = split == data.train_split
    try:
        return BatchReader(
            dataset,
            split,
            tasks_per_step=data.tasks_per_step,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=training and data.shuffle,
            blocks_per_step=data.blocks_per_step if training else 0,
            threads=data.threads,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
