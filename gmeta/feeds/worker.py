"""A process that reads and arranges every n-th batch of a rank, for processes.py, which starts it.

It puts its batches in order into blocks of shared memory, in turns, and says of each where its
tensors stand. It hears what to do, once, and then of each block that the rank has copied what was
in it. What it makes is a function of the config, the dataset and the step: the batches that the
rank itself would make.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gmeta.batches.accumulate import MicroBatches, in_parts
from gmeta.batches.arranging import Arranging
from gmeta.batches.augment import augmented_batch
from gmeta.batches.episodes import Episodes
from gmeta.batches.labels import kinds_of, labels_checked
from gmeta.batches.shared import into_block
from gmeta.config import TrainConfig
from gmeta.errors import GMetaError
from gmeta.feeds.increment import open_data
from gmeta.feeds.reader import open_reader
from gmeta.feeds.shared_block import SharedBlock
from gmeta.numerics import keep_freed_memory
from gmeta.parallel.exchange.planning import Planner
from metaio.errors import MetaIOError
from metaio.read.reader import BatchReader

Place = tuple[int, int]  # epoch, step


@dataclass(frozen=True)
class Work:
    """Which batches a process makes: of all steps from (epoch, step) on, every `of`-th from number
    `index` on.
    """

    config: TrainConfig
    arranging: Arranging
    planner: Planner
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
        except (GMetaError, MetaIOError, OSError) as error:
            yield error

    def _batches(self) -> Iterator[tuple[Place, Episodes | MicroBatches]]:
        """Yield them, arranged.

        Raises:
            GMetaError, MetaIOError, OSError: as reading raises.
        """
        config, dataset = self.config, open_data(self.config.data)
        split, kinds = config.data.train_split, kinds_of(config, dataset)
        augment, seed = config.augment, config.run.seed
        with open_reader(config, dataset, split, self.rank, self.world_size) as reader:
            stored = reader.batches_of_steps(self.places(reader))
            checked = labels_checked(stored, kinds, dataset, split)
            for (epoch, step), batch in zip(self.places(reader), checked, strict=True):
                batch = augmented_batch(batch, augment, dataset.features, seed, epoch, step)
                arrange = in_parts(self.arranging.in_epoch(epoch), config.outer.accumulate_steps)
                episodes = arrange(batch)
                yield (epoch, step), episodes.planned(self.planner.plan(episodes))


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
        turns = cycle([SharedBlock(descriptor) for descriptor in blocks])
        for number, made in enumerate(todo.made()):
            if isinstance(made, Exception):
                rank.send(made)
                break
            if number >= len(blocks):
                rank.recv_bytes()  # the rank has copied what stands in the oldest
            place, episodes = made
            rank.send((place, into_block(episodes, next(turns).first)))
        while True:  # until the other end is closed
            rank.recv_bytes()
