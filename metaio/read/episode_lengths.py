"""The rows of episodes, ahead of their blocks: read from one column of the episodes files alone.

Shape suffixes: E chosen episodes, Z blocks"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, final

import numpy as np

from metaio.errors import MetaIOError
from metaio.ragged import Int32, Int64

if TYPE_CHECKING:
    from metaio.format.dataset import Dataset

HELD_EPISODES = 1 << 23  # 32 MB: more than a window of a split that is shuffled as one
_BLOCKS_AT_ONCE = 256


@final
class EpisodeLengths:
    """The rows of a split's episodes; those of the blocks that were asked for last are held.
    Thread-safe."""

    def __init__(self, dataset: "Dataset", split: str) -> None:
        self._dataset, self._split = dataset, split
        self._num_episodes_Z = dataset.split(split).blocks.num_episodes_Z
        self._lock = threading.Lock()
        # By block, the read that it was part of.
        self._reads: OrderedDict[int, Future[dict[int, Int32]]] = OrderedDict()
        self._num_held = 0  # episodes

    def of_blocks(self, blocks: Sequence[int]) -> list[Int32]:
        """Return the rows of each episode of each of these blocks; what is not held is read, of all
        blocks at once."""
        with self._lock:
            missing = [block for block in dict.fromkeys(blocks) if block not in self._reads]
            read = Future[dict[int, Int32]]()
            self._reads |= dict.fromkeys(missing, read)
            self._num_held += int(self._num_episodes_Z[missing].sum())
            for block in blocks:
                self._reads.move_to_end(block)
            found = [(self._reads[block], block) for block in blocks]
            while self._num_held > HELD_EPISODES and len(self._reads) > 1:
                self._drop(next(iter(self._reads)))
        try:
            if missing:
                rows = self._dataset.read_num_rows(self._split, missing)
                read.set_result(dict(zip(missing, rows, strict=True)))
            return [held.result()[block] for held, block in found]
        except CancelledError:
            return self.of_blocks(blocks)  # another thread could not: now this one says why
        finally:
            if missing and not read.done():
                with self._lock:
                    for block in [b for b, held in self._reads.items() if held is read]:
                        self._drop(block)
                read.cancel()

    def _drop(self, block: int) -> None:
        del self._reads[block]
        self._num_held -= int(self._num_episodes_Z[block])

    def prefetch(self, blocks: Sequence[int]) -> None:
        """Read what is not held of these blocks in the background, if they are far away."""

        def read() -> None:
            with suppress(MetaIOError, OSError):  # raised where they are needed
                self.of_blocks(blocks)

        if not self._dataset.is_local and not self._reads.keys() >= set(blocks):
            threading.Thread(target=read, name="metaio-rows", daemon=True).start()

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
