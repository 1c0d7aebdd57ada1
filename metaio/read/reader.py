"""Streams TaskBatches: threads decode and compose in the background, a queue keeps the order."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from metaio.errors import FormatError
from metaio.read.episode_lengths import EpisodeLengths
from metaio.read.episode_order import (
    BlockEpisodes,
    BlockOrder,
    EpisodeOrder,
    EpisodeSizes,
    OrderConfig,
    make_order,
)
from metaio.read.pipeline import BatchPipeline, Plan

if TYPE_CHECKING:
    from metaio.format.dataset import Dataset
    from metaio.read.batch import TaskBatch
    from metaio.read.equal_cost import TaskCost

DEFAULT_CACHE_BYTES = 1 << 30
# Splits that decode to no more than this are shuffled as one window, hence fully.
FULL_SHUFFLE_BYTES = 256 << 20
# For larger ones: 8 blocks are about 13,000 episodes of 40 rows, or 200 MB of 368-byte rows.
DEFAULT_WINDOW_BLOCKS = 8


@dataclass(frozen=True)
class EpisodeRange:
    """A shard as the data-shard service leases it: `num_episodes` from `first_episode` on."""

    split: str
    first_episode: int
    num_episodes: int


class _PipelineReader:
    """What both readers share: background threads that live until `close`."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        threads: int = 1,
        prefetch_batches: int = 4,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        pin_memory: bool = False,
    ) -> None:
        self._dataset = dataset
        self._pipeline = BatchPipeline(
            dataset,
            threads=threads,
            prefetch_batches=prefetch_batches,
            cache_bytes=cache_bytes,
            pin_memory=pin_memory,
        )

    @property
    def wait_s(self) -> float:
        """Return the seconds that consumers have waited for batches."""
        return self._pipeline.wait_s

    @property
    def busy_s(self) -> float:
        """Return the seconds in which a batch was being read or composed, waited for or not."""
        return self._pipeline.busy_s

    @property
    def num_tasks_composed(self) -> int:
        """Return the number of tasks of all batches composed so far, delivered or not."""
        return self._pipeline.num_tasks_composed

    def close(self) -> None:
        """Stop the background threads."""
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Bundles and `blocks_per_step` read several times as fast as episodes drawn one by one: they are
# copied, or handed over, without looking up positions.
class BatchReader(_PipelineReader):
    """Batches of one rank, epoch by epoch; a step has the same episodes at any world size. With a
    `cost` ranks' batches cost alike, else they have equally many episodes."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        tasks_per_step: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        lanes: int = 1,
        window_blocks: int | None = None,
        drop_last: bool = False,
        blocks_per_step: int = 0,
        rows_per_step: int = 0,
        cost: TaskCost | None = None,
        threads: int = 1,
        prefetch_batches: int = 4,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        pin_memory: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank is {rank}; with world_size {world_size} it must be 0 to {world_size - 1}"
            )
        if 0 < blocks_per_step < world_size:
            raise ValueError(
                f"blocks_per_step is {blocks_per_step} with {world_size} ranks: each needs a block "
                f"of its own. Set it to {world_size} or more"
            )
        self._split = dataset.split(split)
        self._rank, self._world_size = rank, world_size
        if window_blocks is None:
            window_blocks = default_window_blocks(dataset, split)
        self._config = OrderConfig(
            tasks_per_step,
            seed,
            shuffle,
            lanes,
            window_blocks,
            drop_last,
            blocks_per_step,
            rows_per_step,
        )
        rows = EpisodeLengths(dataset, split)
        num_rows_Z = rows.sums_at_most(rows_per_step) if rows_per_step else None
        self._sizes: EpisodeSizes | None = None
        if rows_per_step or (cost is not None and world_size > 1):
            self._sizes = EpisodeSizes(rows.of_blocks, cost, num_rows_Z, rows.prefetch)
        super().__init__(
            dataset,
            threads=threads,
            prefetch_batches=prefetch_batches,
            cache_bytes=cache_bytes,
            pin_memory=pin_memory,
        )
        self._epoch, self._step = 0, 0
        # What `prefetch` began: an epoch and its batches.
        self._started: tuple[int, Iterator[TaskBatch]] | None = None

    def num_steps(self, epoch: int = 0) -> int:
        """Return the number of batches of an epoch, the same on every rank."""
        return self._order(epoch).num_steps

    def batches(
        self, epoch: int | None = None, first_step: int | None = None
    ) -> Iterator[TaskBatch]:
        """Yield one batch a step, empty where this rank has no episode."""
        # Without arguments: where `load_state_dict` said, else from the start of epoch 0.
        self._epoch = self._epoch if epoch is None else epoch
        # A restored step holds for the restored epoch alone.
        if first_step is None:
            first_step = self._step if epoch is None else 0
        self._step = first_step
        for batch in self._stream(self._epoch, first_step):
            # Counted before the yield: a state taken while the batch is in use must not repeat it.
            self._step += 1
            yield batch
        self._epoch, self._step = self._epoch + 1, 0

    def prefetch(self, epoch: int) -> None:
        """Start on the first batches of an epoch in the background; `batches` goes on with them."""
        self._started = (epoch, self._pipeline.start(self._plans(epoch, 0)))

    def _stream(self, epoch: int, first_step: int) -> Iterator[TaskBatch]:
        # Used once: an iterator that was started cannot start again.
        started, self._started = self._started, None
        if started is not None and started[0] == epoch and not first_step:
            return started[1]
        return self._pipeline.run(self._plans(epoch, first_step), look_ahead=True)

    def batches_of_steps(self, steps: Iterable[tuple[int, int]]) -> Generator[TaskBatch]:
        """Yield the batch of each (epoch, step), for processes that share the steps of a rank."""
        return self._pipeline.run(self._plans_of(steps), look_ahead=True)

    def _plans(self, epoch: int, first_step: int) -> Iterator[Plan]:
        """Yield the plans of an epoch; lazily, so that only what is read ahead is planned."""
        return self._plans_of((epoch, step) for step in range(first_step, self.num_steps(epoch)))

    def _plans_of(self, steps: Iterable[tuple[int, int]]) -> Iterator[Plan]:
        for epoch, of_epoch in groupby(steps, key=itemgetter(0)):
            order = self._order(epoch)
            for _, step in of_epoch:
                parts = order.step(step, self._rank, self._world_size)
                yield [(self._split.name, part) for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """Return where the next batch begins; batches that were prefetched only do not count."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, at any world size."""
        for name, value in self._identity().items():
            # A state of an earlier release has no rows_per_step.
            if state.get(name, 0) != value:
                raise FormatError(
                    f"the reader's state has {name} {state.get(name)}, this reader has {value}: "
                    "the order of episodes would differ. Resume with the data and the settings of "
                    "the run that was saved"
                )
        self._epoch, self._step = int(state["epoch"]), int(state["step"])

    def _order(self, epoch: int) -> EpisodeOrder | BlockOrder:
        blocks = self._split.blocks
        return make_order(
            blocks.num_episodes_Z, self._config, epoch, blocks.bundle_tasks, self._sizes
        )

    def _identity(self) -> dict[str, Any]:
        # All that decides the order: with another value a step would be other episodes.
        data = {"fingerprint": self._dataset.fingerprint, "split": self._split.name}
        return {**data, **vars(self._config)}


def default_window_blocks(dataset: Dataset, split: str) -> int:
    """Return all blocks of a split that fits in FULL_SHUFFLE_BYTES, else DEFAULT_WINDOW_BLOCKS."""
    if int(dataset.block_bytes(split).sum()) <= FULL_SHUFFLE_BYTES:
        return max(dataset.split(split).num_blocks, 1)
    return DEFAULT_WINDOW_BLOCKS


class RangeReader(_PipelineReader):
    """Batches of given episodes, for consumers that a service tells what to read next."""

    def batches(self, groups: Iterable[Sequence[EpisodeRange]]) -> Generator[TaskBatch]:
        """Yield the batch of each group of disjoint ranges, its episodes in stored order."""
        # `groups` may ask a service for leases: it is advanced as needed, in the consumer's thread.
        return self._pipeline.run(_group_plan(self._dataset, group) for group in groups)

    def begin(self, group: Sequence[EpisodeRange]) -> Iterator[TaskBatch]:
        """Return an iterator of the one batch of a group, which is being read from now on."""
        return self._pipeline.start([_group_plan(self._dataset, group)])


def read_ranges(
    dataset: Dataset, ranges: Iterable[EpisodeRange], *, tasks_per_batch: int, threads: int = 1
) -> Iterator[TaskBatch]:
    """Yield batches of at most `tasks_per_batch` episodes; no batch spans two ranges."""
    with RangeReader(dataset, threads=threads) as reader:
        yield from reader.batches(
            [cut] for part in ranges for cut in _cut_range(dataset, part, tasks_per_batch)
        )


def _cut_range(dataset: Dataset, part: EpisodeRange, num_episodes: int) -> Iterator[EpisodeRange]:
    end = part.first_episode + part.num_episodes
    # Checked before it is cut: a message about a part of the range would puzzle.
    _check_range(dataset, part)
    for first in range(part.first_episode, end, num_episodes):
        yield EpisodeRange(part.split, first, min(num_episodes, end - first))


def _check_range(dataset: Dataset, part: EpisodeRange) -> None:
    split = dataset.split(part.split)
    end = part.first_episode + part.num_episodes
    if part.first_episode < 0 or part.num_episodes < 0 or end > split.num_episodes:
        raise FormatError(
            f"episodes {part.first_episode} to {end} are outside split {part.split}, which has "
            f"{split.num_episodes}. The list of ranges belongs to another dataset"
        )


def _group_plan(dataset: Dataset, group: Sequence[EpisodeRange]) -> Plan:
    """Return the blocks of a group, each once, as compose needs."""
    plan: Plan = []
    ordered = sorted(group, key=attrgetter("split", "first_episode"))
    for split, parts in groupby(ordered, key=attrgetter("split")):
        ranges = []
        for part in parts:
            _check_range(dataset, part)
            ranges.append(np.arange(part.first_episode, part.first_episode + part.num_episodes))
        offsets, episodes = dataset.split(split).episode_offsets, np.concatenate(ranges)
        # Several ranges may touch one block: their episodes are joined there, in stored order.
        block_E = np.searchsorted(offsets, episodes, side="right") - 1
        firsts = np.flatnonzero(np.diff(block_E, prepend=-1))
        within = np.split(episodes - offsets[block_E], firsts[1:])
        plan += [
            (split, BlockEpisodes(int(block_E[first]), mine))
            for first, mine in zip(firsts, within, strict=False)  # of no episode there is one cut
        ]
    return plan
