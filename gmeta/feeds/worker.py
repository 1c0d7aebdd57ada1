"""A process that reads and arranges every n-th batch of a rank, for processes.py, which starts it.

It puts its batches in order into blocks of shared memory, in turns, and says of each where its
tensors stand. It hears how to make them, once. Which they are it works out by itself where a rank's
share is fixed, and hears of each block that the rank has copied what was in it; a rank that leases
shards asks for each batch. What it makes is a function of the config, the dataset and the step (and
of what it was asked for): the batches that the rank itself would make.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gmeta.batches.accumulate import MicroBatches, in_parts
from gmeta.batches.arranging import Arranging
from gmeta.batches.augment import augmented_batch
from gmeta.batches.episodes import Episodes
from gmeta.batches.labels import kinds_of, labels_checked
from gmeta.batches.shared import Told, into_block
from gmeta.config import TrainConfig
from gmeta.errors import GMetaError
from gmeta.feeds.increment import open_data
from gmeta.feeds.reader import open_reader
from gmeta.feeds.shared_block import SharedBlock
from gmeta.numerics import keep_freed_memory
from gmeta.parallel.exchange.planning import Planner
from metaio.errors import MetaIOError
from metaio.format.features import Features
from metaio.read.batch import TaskBatch
from metaio.read.reader import BatchReader, EpisodeRange, RangeReader

Place = tuple[int, int]  # epoch, step
_ERRORS = GMetaError, MetaIOError, OSError  # of reading, told to the rank


class Asked(NamedTuple):
    """A batch that a rank asks for."""

    place: Place
    ranges: npt.NDArray[np.int64]  # [R, 2]: first episode of the training split, and how many
    num_parts: int  # that its step is worked through in


class Answer(NamedTuple):
    """Where the batch stands that was asked for, or why it cannot be made."""

    place: Place
    what: Told | Exception
    seconds: float  # that it took


@dataclass(frozen=True)
class Work(ABC):
    """What a process does."""

    config: TrainConfig
    arranging: Arranging
    planner: Planner

    @abstractmethod
    def work(self, rank: Connection, blocks: list[SharedBlock]) -> None:
        """Make batches for the rank at the other end, until it is gone (EOFError,
        ConnectionError) or none is left.
        """

    def episodes(
        self, batch: TaskBatch, features: Features, place: Place, num_parts: int
    ) -> Episodes | MicroBatches:
        """Return a stored batch as the learner and its exchange take it in this place of the
        run.
        """
        config, (epoch, step) = self.config, place
        batch = augmented_batch(batch, config.augment, features, config.run.seed, epoch, step)
        episodes = in_parts(self.arranging.in_epoch(epoch), num_parts)(batch)
        return episodes.planned(self.planner.plan(episodes))


@dataclass(frozen=True)
class OwnWork(Work):
    """Makes of all steps from (epoch, step) on every `of`-th from number `index` on."""

    rank: int
    world_size: int
    epoch: int
    step: int
    index: int
    of: int

    def places(self, reader: BatchReader) -> Iterator[Place]:
        """Yield their places in the run."""
        number, first = 0, self.step
        for epoch in range(self.epoch, self.config.run.epochs):
            for step in range(first, reader.num_steps(epoch)):
                if number % self.of == self.index:
                    yield epoch, step
                number += 1
            first = 0

    def made(self) -> Iterator[tuple[Place, Episodes | MicroBatches] | Exception]:
        """Yield the batches; in place of one that cannot be made the error, which is the last."""
        try:
            yield from self._batches()
        except _ERRORS as error:
            yield error

    def _batches(self) -> Iterator[tuple[Place, Episodes | MicroBatches]]:
        """Yield them, arranged.

        Raises:
            GMetaError, MetaIOError, OSError: as reading raises.
        """
        config, dataset = self.config, open_data(self.config.data)
        split, kinds = config.data.train_split, kinds_of(config, dataset)
        num_parts = config.outer.accumulate_steps
        with open_reader(config, dataset, split, self.rank, self.world_size) as reader:
            stored = reader.batches_of_steps(self.places(reader))
            checked = labels_checked(stored, kinds, dataset, split)
            for place, batch in zip(self.places(reader), checked, strict=True):
                yield place, self.episodes(batch, dataset.features, place, num_parts)

    def work(self, rank: Connection, blocks: list[SharedBlock]) -> None:
        """Make them ahead, as far as the blocks go."""
        turns = cycle(blocks)
        for number, made in enumerate(self.made()):
            if isinstance(made, Exception):
                rank.send(made)
                return
            if number >= len(blocks):
                rank.recv_bytes()  # the rank has copied what stands in the oldest
            place, episodes = made
            rank.send((place, into_block(episodes, next(turns).first)))


@dataclass(frozen=True)
class AskedWork(Work):
    """Makes what the rank asks for, one after the other: only a rank knows what it has leased."""

    def work(self, rank: Connection, blocks: list[SharedBlock]) -> None:
        """Answer. Who asks has copied all but the last two batches that were asked for."""
        turns, make = cycle(blocks), None
        with ExitStack() as held:
            while True:
                asked: Asked = rank.recv()
                began_s = perf_counter()
                what: Told | Exception
                try:
                    make = make or self.maker(held)
                    what = into_block(make(asked), next(turns).first)
                except _ERRORS as error:
                    what = error  # of this one: the rank may have dropped it
                rank.send(Answer(asked.place, what, perf_counter() - began_s))

    def maker(self, held: ExitStack) -> Callable[[Asked], Episodes | MicroBatches]:
        """Return what makes a batch, as long as `held` is open.

        Raises:
            GMetaError, MetaIOError, OSError: as reading raises; also the function.
        """
        config, dataset = self.config, open_data(self.config.data)
        split, kinds = config.data.train_split, kinds_of(config, dataset)
        reader = held.enter_context(RangeReader(dataset, threads=config.data.threads))

        def made(asked: Asked) -> Episodes | MicroBatches:
            group = [EpisodeRange(split, *part) for part in asked.ranges.tolist()]
            (batch,) = labels_checked(reader.batches([group]), kinds, dataset, split)
            return self.episodes(batch, dataset.features, asked.place, asked.num_parts)

        return made


def work(connection: int, *blocks: int) -> None:
    """Do what the rank says at the other end of a connection, until it closes that or is gone;
    all are given by their descriptors.
    """
    with suppress(OSError):
        Path("/proc/self/comm").write_text("gmeta-batches")  # as `top` shows it
    torch.set_num_threads(1)
    keep_freed_memory()
    with Connection(connection) as rank, suppress(EOFError, ConnectionError):
        todo: Work = rank.recv()
        todo.work(rank, [SharedBlock(descriptor) for descriptor in blocks])
        while True:  # until the other end is closed
            rank.recv_bytes()
