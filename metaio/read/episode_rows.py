"""The rows of episodes, ahead of their blocks: read from one column of the episodes files alone.

Shape suffixes: E chosen episodes, Z blocks"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from metaio.ragged import Int32, Int64

if TYPE_CHECKING:
    from metaio.format.dataset import Dataset

HELD_EPISODES = 1 << 23  # 32 MB: more than a window of a split that is shuffled as one
_BLOCKS_AT_ONCE = 256


@final
class EpisodeRows:
    """The rows of a split's episodes; those of the blocks that were asked for last are held."""

    def __init__(self, dataset: "Dataset", split: str) -> None:
        self._dataset, self._split = dataset, split
        self._held: OrderedDict[int, Int32] = OrderedDict()
        self._num_held = 0  # episodes

    def of_blocks(self, blocks: Sequence[int]) -> list[Int32]:
        """Return the rows of each episode of each of these blocks; what is not held is read, of all
        blocks at once."""
        missing = [block for block in dict.fromkeys(blocks) if block not in self._held]
        if missing:
            read = self._dataset.read_num_rows(self._split, missing)
            self._held |= zip(missing, read, strict=True)
            self._num_held += sum(map(len, read))
        for block in blocks:
            self._held.move_to_end(block)
        found = [self._held[block] for block in blocks]
        while self._num_held > HELD_EPISODES and len(self._held) > 1:
            self._num_held -= len(self._held.popitem(last=False)[1])
        return found

    def sums_at_most(self, most: int) -> Int64:
        """Return the rows of each block [Z], where an episode counts for `most` at most; reads all
        blocks, holds none."""
        num_blocks = self._dataset.split(self._split).num_blocks
        sums: list[int] = []
        for first in range(0, num_blocks, _BLOCKS_AT_ONCE):
            blocks = range(first, min(first + _BLOCKS_AT_ONCE, num_blocks))
            read = self._dataset.read_num_rows(self._split, blocks)
            sums += [int(np.minimum(num_rows_E, most).sum()) for num_rows_E in read]
        return np.array(sums, np.int64)
