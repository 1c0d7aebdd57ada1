"""A process that reads and collates every n-th batch of a rank (batch_workers.py)."""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cached_property
from itertools import cycle, islice, tee
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import final

import torch

from gmeta.data.augment import augment_batches
from gmeta.data.label_checks import check_labels
from gmeta.data.opening import open_data
from gmeta.data.reader import open_reader
from gmeta.data.shared_batch import BlockDescription, write_to_block
from gmeta.errors import GMetaError
from gmeta.feeds.batch_request import BatchReply, BatchRequest, BatchWork, Place, places_from
from gmeta.feeds.shared_block import SharedBlock
from gmeta.platform.numerics import keep_freed_memory
from metaio.errors import MetaIOError
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch
from metaio.read.reader import BatchReader, EpisodeRange, RangeReader

_ERRORS = GMetaError, MetaIOError, OSError  # of reading, raised on the rank


@final
class TrainingSplit:
    """Reads the training split, which is opened at the first request."""

    def __init__(self, work: BatchWork, held: ExitStack) -> None:
        """Read as long as `held` is open."""
        self._work, self._held = work, held
        self._share: Iterator[tuple[Place, TaskBatch]] = iter(())

    @cached_property
    def _dataset(self) -> Dataset:
        return open_data(self._work.settings.data)

    @cached_property
    def _share_reader(self) -> BatchReader:
        work, data = self._work, self._work.settings.data
        seed, split = work.settings.run.seed, data.train_split
        reader = open_reader(data, seed, self._dataset, split, work.rank, work.world_size)
        return self._held.enter_context(reader)

    @cached_property
    def _range_reader(self) -> RangeReader:
        threads = self._work.settings.data.threads
        return self._held.enter_context(RangeReader(self._dataset, threads=threads))

    def begin(self, request: BatchRequest) -> Iterator[TaskBatch]:
        """Return an iterator of the requested batch, checked and augmented."""
        # It is read in the background until then. From settings, dataset and request alone: the
        # batch that the rank itself would make.
        settings, dataset = self._work.settings, self._dataset
        split, seed = settings.split, settings.run.seed
        if request.ranges is None:
            stored: Iterator[TaskBatch] = map(self._share_of, [request.place])
        else:
            group = [EpisodeRange(split, *part) for part in request.ranges.tolist()]
            stored = self._range_reader.begin(group)
        checked = check_labels(stored, settings.kinds, dataset, split)
        place, features = request.place, dataset.features
        augmented = augment_batches(checked, settings.augment, features, seed, *place)
        return self._work.collate_options.with_drawn_items(augmented, *place)

    def _share_of(self, place: Place) -> TaskBatch:
        found = next(self._share, None)
        if found is None:  # the first, or behind one that could not be read
            # The batches that this process will be asked for are read ahead.
            work, reader = self._work, self._share_reader
            to_come = places_from(place, reader.num_steps(), work.settings.run.epochs)
            places, planned = tee(islice(to_come, 0, None, work.num_processes))
            self._share = zip(places, reader.batches_of_steps(planned), strict=False)
            found = next(self._share)
        made_for, batch = found
        assert made_for == place, f"the batch of {made_for}, where that of {place} was asked for"
        return batch


def work(connection: int, *blocks: int) -> None:
    """Serve the rank at the other end of a connection, until it closes that or is gone; connection
    and blocks are descriptors."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text("gmeta-batches")  # as `top` shows it
    # A process counts as one core of its rank's: see resolve_num_processes.
    torch.set_num_threads(1)
    keep_freed_memory()
    with Connection(connection) as rank, suppress(EOFError, ConnectionError):
        serve_requests(rank, rank.recv(), [SharedBlock(descriptor) for descriptor in blocks])


def serve_requests(rank: Connection, work: BatchWork, blocks: list[SharedBlock]) -> None:
    """Make the batches that the rank requests, one after the other, until it is gone (EOFError,
    ConnectionError). It never has more batches to copy than there are blocks."""
    turns, pending = cycle(blocks), deque[tuple[BatchRequest, Iterator[TaskBatch] | Exception]]()
    with ExitStack() as held:
        split = TrainingSplit(work, held)
        while True:
            # All requests so far are begun first: while one batch is collated the next is read.
            while not pending or rank.poll():
                request: BatchRequest = rank.recv()
                try:
                    pending.append((request, split.begin(request)))
                except _ERRORS as error:
                    pending.append((request, error))
            (request, batches), block = pending.popleft(), next(turns)
            began_s = perf_counter()
            result: BlockDescription | Exception
            try:
                if isinstance(batches, Exception):
                    raise batches
                result = write_to_block(work.collate(next(batches), request), block.first)
            except _ERRORS as error:
                result = error  # of this batch alone: the rank may have dropped it
            rank.send(BatchReply(request.place, result, perf_counter() - began_s))
