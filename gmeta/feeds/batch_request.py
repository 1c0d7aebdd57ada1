"""What a rank (processes.py) and the processes that make its batches (worker.py) say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from gmeta.config.inputs import AugmentConfig
from gmeta.config.train_config import DataConfig, RunConfig, TrainConfig
from gmeta.data.accumulate import MicroBatches
from gmeta.data.collate import collate_in_parts
from gmeta.data.episodes import Episodes
from gmeta.distributed.exchange.planning import Planner
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch

if TYPE_CHECKING:
    from gmeta.data.collate import CollateOptions
    from gmeta.data.shared_batch import BlockDescription

Place = tuple[int, int]  # epoch, step


class BatchRequest(NamedTuple):
    """A batch that a rank asks for."""

    place: Place
    # [R, 2]: first episode of the training split, and how many; None: the rank's fixed share.
    ranges: npt.NDArray[np.int64] | None
    num_parts: int  # that its step is worked through in


class BatchReply(NamedTuple):
    """Where the batch stands that was asked for, or why it cannot be made."""

    place: Place
    result: BlockDescription | Exception
    seconds: float  # that it took


def places_from(place: Place, num_steps: int, epochs: int) -> Iterator[Place]:
    """Yield the places of a run, whose epochs have `num_steps` steps, from this one on."""
    epoch, step = place
    for at in range(epoch, epochs):
        for of_epoch in range(step if at == epoch else 0, num_steps):
            yield at, of_epoch


@dataclass(frozen=True)
class BatchSettings:
    """What a run's batches are made from, and in which order."""

    data: DataConfig
    augment: AugmentConfig
    run: RunConfig
    kinds: tuple[str, ...]  # the loss of each label
    num_parts: int  # that a step is worked through in

    @classmethod
    def of(cls, config: TrainConfig, dataset: Dataset) -> BatchSettings:
        """Return those of a config."""
        kinds = config.labels.loss_kinds(config.outer.loss, dataset.features.labels)
        return cls(config.data, config.augment, config.run, kinds, config.outer.accumulate_steps)

    @property
    def split(self) -> str:
        """Return the split to train on."""
        return self.data.train_split


@dataclass(frozen=True)
class BatchWork:
    """How a process makes batches."""

    settings: BatchSettings
    collate_options: CollateOptions
    planner: Planner
    rank: int
    world_size: int
    num_processes: int  # processes that are asked in turns

    def collate(self, batch: TaskBatch, request: BatchRequest) -> Episodes | MicroBatches:
        """Return a batch that was read as the learner and its exchange take it."""
        collate = self.collate_options.collator_of(request.place[0])
        episodes = collate_in_parts(collate, request.num_parts)(batch)
        return episodes.with_plan(self.planner.plan(episodes))
