"""Which episodes each rank trains on at each step: a pure function of seed, epoch and block table.

Blocks are put in a random order and dealt to lanes, round robin; in a lane, windows of consecutive
blocks are shuffled episode by episode (or bundle by bundle). A step takes its episodes lane by
lane, a rank a contiguous slice of the step: the world size never moves an episode to another step.
Slices cost alike, or, where nothing says what an episode costs, hold equally many.

Shape suffixes: E chosen episodes, W ranks or workers, Z blocks"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from metaio.hashing import splitmix64
from metaio.ragged import Int32, Int64, offsets, ragged_indices
from metaio.read.equal_cost import Float64, TaskCost, cut_evenly


@dataclass(frozen=True)
class BlockEpisodes:
    """Episodes of one block, by their ascending index within the block."""

    block: int
    episodes: Int64


# Returns the rows of each episode of each block.
RowsOfBlocks = Callable[[Sequence[int]], Sequence[Int32]]


@dataclass(frozen=True)
class EpisodeSizes:
    """The rows of episodes, and what they cost a rank; beside the order: it needs neither."""

    rows_of: RowsOfBlocks
    # None: slices of equal numbers.
    cost: TaskCost | None = None
    # With rows_per_step: the rows of each block, of an episode rows_per_step at most.
    num_rows_Z: Int64 | None = None
    # Is told which blocks come next.
    prefetch: Callable[[Sequence[int]], object] = lambda _: None

    def costs_of(self, parts: Sequence[BlockEpisodes], cost: TaskCost) -> Float64:
        """Return the cost of each episode of these parts [E]."""
        read = self.rows_of([part.block for part in parts])
        rows = [own_E[part.episodes] for own_E, part in zip(read, parts, strict=True)]
        return cost.of_episodes(np.concatenate(rows))


@dataclass(frozen=True)
class OrderConfig:
    """How the episodes of an epoch are ordered."""

    # Episodes of all ranks.
    tasks_per_step: int
    seed: int = 0
    # False keeps the stored order, lane by lane.
    shuffle: bool = True
    # Independent streams of blocks that feed a step: with a multiple of the world size each rank
    # reads only its own lanes' blocks.
    lanes: int = 1
    # Blocks of a lane that are shuffled together.
    window_blocks: int = 1 << 30
    # Leaves out a last step of fewer episodes.
    drop_last: bool = False
    # Above 0: a step is that many stored blocks; tasks_per_step, lanes, window_blocks are unused.
    blocks_per_step: int = 0
    # Above 0: a step is at least about that many rows of whole episodes, all steps of an epoch
    # alike; tasks_per_step and drop_last are unused.
    rows_per_step: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks_per_step", "lanes", "window_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least 1. Raise it"
                )
        for name in ("blocks_per_step", "rows_per_step"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least 0. Raise it"
                )
        if self.rows_per_step and (self.blocks_per_step or self.lanes > 1):
            other = "blocks_per_step" if self.blocks_per_step else "lanes"
            raise ValueError(
                f"rows_per_step is {self.rows_per_step} and {other} is {getattr(self, other)}: a "
                "step is counted in rows or in blocks, and in rows of one lane. Set one of them"
            )
        if self.tasks_per_step < self.lanes:
            raise ValueError(
                f"tasks_per_step is {self.tasks_per_step} and lanes is {self.lanes}: every lane "
                "gives at least one episode to a step. Lower lanes or raise tasks_per_step"
            )


class EpisodeOrder:
    """The order of one split's episodes in one epoch; bundles of `bundle_tasks` stay together."""

    def __init__(
        self,
        num_episodes_Z: npt.ArrayLike,
        config: OrderConfig,
        epoch: int = 0,
        bundle_tasks: int = 0,
        sizes: EpisodeSizes | None = None,
    ) -> None:
        self.config = config
        self._sizes = sizes
        self._bundle_tasks = bundle_tasks
        self._episode_offsets = offsets(num_episodes_Z)
        num_blocks = len(self._episode_offsets) - 1
        self._key = _mix(config.seed, epoch)
        order = _block_order(num_blocks, config.shuffle, self._key)
        self._lane_blocks = [order[lane :: config.lanes] for lane in range(config.lanes)]
        lengths_Z = np.diff(self._episode_offsets)
        # Only these sums are kept: an epoch of millions of episodes is planned window by window.
        self._window_offsets = [
            offsets(_window_sums(lengths_Z[blocks], config.window_blocks))
            for blocks in self._lane_blocks
        ]
        self._lane_totals = np.array([lane[-1] for lane in self._window_offsets])
        base, extra = divmod(config.tasks_per_step, config.lanes)
        self._quotas = base + (np.arange(config.lanes) < extra)
        # Until a lane runs out, a step is a round and its place in each lane is a product. The slow
        # way is needed for what comes after, which is at most a few blocks long.
        self._whole_rounds = int((self._lane_totals // self._quotas).min())
        # A step may straddle two windows of a lane.
        self._window = lru_cache(maxsize=2 * config.lanes)(self._shuffled_window)
        self._window_rows: Int64 | None = None
        if config.rows_per_step:
            assert sizes is not None
            assert sizes.num_rows_Z is not None, "rows_per_step needs the rows of blocks"
            rows_Z = sizes.num_rows_Z[self._lane_blocks[0]]
            self._window_rows = offsets(_window_sums(rows_Z, config.window_blocks))
            self._row_offsets = lru_cache(maxsize=2)(self._row_offsets_of_window)

    @property
    def num_episodes(self) -> int:
        """Return the number of episodes of all blocks."""
        return int(self._episode_offsets[-1])

    @property
    def num_steps(self) -> int:
        """Return the number of steps of this epoch, the same on every rank."""
        if self._window_rows is not None:
            num_rows = int(self._window_rows[-1])
            return min(num_rows, max(1, num_rows // self.config.rows_per_step))
        num_full_steps, rest = divmod(self.num_episodes, self.config.tasks_per_step)
        return num_full_steps + (rest > 0 and not self.config.drop_last)

    def step(self, step: int, rank: int = 0, world_size: int = 1) -> list[BlockEpisodes]:
        """Return the episodes that `rank` trains on at `step`, grouped by block; empty for none."""
        _check_step(step, self.num_steps)
        starts, stops = self._lane_ranges(step)
        # Of this step's size: a short last step is also dealt to all ranks.
        size = int((stops - starts).sum())
        if self._sizes is None or self._sizes.cost is None or world_size == 1:
            first, stop = rank * size // world_size, (rank + 1) * size // world_size
            return self._group(self._slice(starts, stops, first, stop))
        episodes_E = self._slice(starts, stops, 0, size)
        costs_E = self._sizes.costs_of(self._group(episodes_E), self._sizes.cost)
        cuts_W1 = cut_evenly(costs_E, world_size)
        return self._group(episodes_E[cuts_W1[rank] : cuts_W1[rank + 1]])

    def _slice(self, starts: Int64, stops: Int64, first: int, stop: int) -> Int64:
        """Return episodes [first, stop) of a step's list, as indices into the split."""
        lane_offsets = offsets(stops - starts)
        found = [np.zeros(0, dtype=np.int64)]
        for lane in range(self.config.lanes):
            begin, end = max(first, lane_offsets[lane]), min(stop, lane_offsets[lane + 1])
            if begin < end:
                # Only lanes that this rank reads: a window costs a sort of all its episodes.
                episodes = self._lane_episodes(lane, int(starts[lane]), int(stops[lane]))
                found.append(episodes[begin - lane_offsets[lane] : end - lane_offsets[lane]])
        return np.concatenate(found)

    def _lane_ranges(self, step: int) -> tuple[Int64, Int64]:
        """Return the positions [start, stop) that a step takes from each lane."""
        if self._window_rows is not None:
            return np.array([self._find_start(step)]), np.array([self._find_start(step + 1)])
        if step < self._whole_rounds:
            return step * self._quotas, (step + 1) * self._quotas
        first = step * self.config.tasks_per_step
        return self._count_before(first), self._count_before(first + self.config.tasks_per_step)

    def _count_before(self, position: int) -> Int64:
        """Return how many episodes of each lane are among the first `position` of the epoch."""
        # Lanes go on in rounds of their quotas, each giving what it has left, and steps cut that
        # sequence evenly: so only the last step of an epoch is short.
        position = min(position, self.num_episodes)
        # How many rounds fit before the position; rounds only shrink, so bisection finds it.
        low, high = self._whole_rounds, int((-(-self._lane_totals // self._quotas)).max())
        while low < high:
            middle = (low + high + 1) // 2
            if np.minimum(middle * self._quotas, self._lane_totals).sum() <= position:
                low = middle
            else:
                high = middle - 1
        selected: Int64 = np.minimum(low * self._quotas, self._lane_totals)
        for lane in range(self.config.lanes):
            left = position - int(selected.sum())
            rest = int(self._lane_totals[lane] - selected[lane])
            selected[lane] += min(left, int(self._quotas[lane]), rest)
        return selected

    # Steps divide the epoch's rows evenly, and have the episodes that begin in their rows: which
    # these are the rows of blocks tell, and those of the episodes of a window. As no episode counts
    # for more than a step, none is longer than one and no step is empty.
    def _find_start(self, step: int) -> int:
        """Return the first episode, in the epoch's order, of a step that is counted in rows."""
        assert self._window_rows is not None
        row = -(-step * int(self._window_rows[-1]) // self.num_steps)
        if row == self._window_rows[-1]:
            return self.num_episodes
        window = int(np.searchsorted(self._window_rows, row, side="right")) - 1
        within = np.searchsorted(self._row_offsets(window), row - self._window_rows[window])
        return int(self._window_offsets[0][window] + within)

    def _row_offsets_of_window(self, window: int) -> Int64:
        """Return the first row of each episode of a window, in its shuffled order, and the end."""
        assert self._sizes is not None
        episodes_E = self._window(0, window)
        parts = self._group(np.sort(episodes_E))
        # The window's blocks are complete: sorted, its episodes are those of all of them.
        rows_E = np.concatenate(self._sizes.rows_of([part.block for part in parts]))
        place_E = np.argsort(np.argsort(episodes_E))
        return offsets(np.minimum(rows_E, self.config.rows_per_step)[place_E])

    def _lane_episodes(self, lane: int, start: int, stop: int) -> Int64:
        windows = self._window_offsets[lane]
        first = int(np.searchsorted(windows, start, side="right")) - 1
        last = int(np.searchsorted(windows, stop, side="left"))
        parts = []
        for window in range(first, last):
            begin, end = max(start, windows[window]), min(stop, windows[window + 1])
            episodes = self._window(lane, window)
            parts.append(episodes[begin - windows[window] : end - windows[window]])
        selected = np.concatenate(parts)
        # Membership of a step is random, order within it is not: sorted, the episodes of one block
        # stand together and are gathered in one go.
        return np.sort(selected) if self.config.shuffle else selected

    def _shuffled_window(self, lane: int, window: int) -> Int64:
        size = self.config.window_blocks
        blocks = self._lane_blocks[lane][window * size : (window + 1) * size]
        if self._sizes is not None:
            self._sizes.prefetch(self._lane_blocks[lane][(window + 1) * size :][:size].tolist())
        starts = self._episode_offsets[blocks]
        lengths = self._episode_offsets[blocks + 1] - starts
        episodes = ragged_indices(starts, lengths)
        if not self.config.shuffle:
            return episodes
        if not self._bundle_tasks:
            return episodes[self._shuffle_groups(episodes)]
        # All episodes of a bundle share the key of its first: a stable sort keeps them together.
        within = episodes - np.repeat(starts, lengths)
        order = self._shuffle_groups(episodes - within % self._bundle_tasks)
        is_short = (within >= np.repeat(lengths - lengths % self._bundle_tasks, lengths))[order]
        shuffled = np.concatenate([episodes[order[~is_short]], episodes[order[is_short]]])
        # Steps should begin with a complete bundle: short bundles go last, and the episodes that a
        # bundle begun in the window before still lacks go first.
        lacking = -int(self._window_offsets[lane][window]) % self._bundle_tasks
        return np.roll(shuffled, lacking)

    def _shuffle_groups(self, values: Int64) -> Int64:
        """Return the indices of values in random order; equal ones stay together, in order."""
        # Sorted by a hash: the streams of numpy's shuffle may change between releases.
        return np.argsort(splitmix64(values.astype(np.uint64) ^ self._key), kind="stable")

    def _group(self, episodes_E: Int64) -> list[BlockEpisodes]:
        blocks_E = np.searchsorted(self._episode_offsets, episodes_E, side="right") - 1
        cuts = np.flatnonzero(np.diff(blocks_E, prepend=-1, append=-1))
        within_E = episodes_E - self._episode_offsets[blocks_E]
        return [
            BlockEpisodes(int(blocks_E[first]), within_E[first:stop])
            for first, stop in itertools.pairwise(cuts)
        ]


# The batch-level shuffle of G-Meta (section 3.2.1): which episodes share a block was drawn by the
# hash of their task when the data was prepared.
class BlockOrder:
    """The order of one split's blocks in one epoch; a rank takes a slice of each step's blocks."""

    def __init__(self, num_episodes_Z: npt.ArrayLike, config: OrderConfig, epoch: int = 0) -> None:
        self.config = config
        self._num_episodes_Z = np.asarray(num_episodes_Z)
        key = _mix(config.seed, epoch)
        self._blocks = _block_order(len(self._num_episodes_Z), config.shuffle, key)

    @property
    def num_steps(self) -> int:
        """Return the number of steps of this epoch, the same on every rank."""
        num_full_steps, rest = divmod(len(self._blocks), self.config.blocks_per_step)
        return num_full_steps + (rest > 0 and not self.config.drop_last)

    def step(self, step: int, rank: int = 0, world_size: int = 1) -> list[BlockEpisodes]:
        """Return the blocks that `rank` trains on at `step`, with all their episodes."""
        _check_step(step, self.num_steps)
        first = step * self.config.blocks_per_step
        blocks = self._blocks[first : first + self.config.blocks_per_step]
        # Equal numbers are equal costs: blocks of a split have about as many rows.
        own = blocks[rank * len(blocks) // world_size : (rank + 1) * len(blocks) // world_size]
        sizes = self._num_episodes_Z
        return [BlockEpisodes(block, np.arange(sizes[block])) for block in own.tolist()]


def make_order(
    num_episodes_Z: npt.ArrayLike,
    config: OrderConfig,
    epoch: int = 0,
    bundle_tasks: int = 0,
    sizes: EpisodeSizes | None = None,
) -> EpisodeOrder | BlockOrder:
    """Return the order of episodes, or of blocks where the config counts a step in these."""
    if config.blocks_per_step:
        return BlockOrder(num_episodes_Z, config, epoch)
    return EpisodeOrder(num_episodes_Z, config, epoch, bundle_tasks, sizes)


def _check_step(step: int, num_steps: int) -> None:
    if not 0 <= step < num_steps:
        raise IndexError(
            f"step {step} is outside this epoch's 0 to {num_steps - 1}. Begin the next epoch"
        )


def _block_order(num_blocks: int, shuffle: bool, key: npt.NDArray[np.uint64]) -> Int64:
    blocks = np.arange(num_blocks)
    if not shuffle:
        return blocks
    return np.argsort(splitmix64(blocks.astype(np.uint64) ^ key), kind="stable")


def _window_sums(lengths: Int64, window: int) -> Int64:
    if not len(lengths):
        return lengths
    sums: Int64 = np.add.reduceat(lengths, np.arange(0, len(lengths), min(window, len(lengths))))
    return sums


def _mix(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    # Mixed before the epoch is added: seed 1 in epoch 0 must differ from seed 0 in epoch 1.
    return splitmix64(splitmix64(np.array([seed % (1 << 64)], dtype=np.uint64)) + np.uint64(epoch))
