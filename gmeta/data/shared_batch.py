"""A collated batch on its way between two processes: its tensors in one shared block of memory, and
a description of the block."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes, device_trees, with_trees
from gmeta.data.transfer import Packed, TreeLayout, pack


class BlockDescription(NamedTuple):
    """The layout of a block: a few hundred numbers, which are pickled."""

    num_bytes: int
    # Start and layout of what a device needs of each part, and of the parts without it.
    trees: list[tuple[int, TreeLayout[Any]]]
    rest: tuple[int, TreeLayout[tuple[Episodes, ...]]]
    is_whole: bool  # the step is taken in one part


def write_to_block(
    episodes: Episodes | MicroBatches, memory: Callable[[int], Tensor]
) -> BlockDescription:
    """Copy a batch on the host into a block from `memory`; return the block's description."""
    parts = episodes.parts if isinstance(episodes, MicroBatches) else (episodes,)
    trees = device_trees(parts)
    rest = with_trees(parts, [None] * len(trees))
    *found, last = pack([*trees, rest], memory=memory)
    return BlockDescription(
        last.full_block.nbytes,
        [(one.start, one.layout) for one in found],
        (last.start, last.layout),
        isinstance(episodes, Episodes),
    )


def read_from_block(description: BlockDescription, block: Tensor) -> Episodes | MicroBatches:
    """Return the batch as views of a block; what a device needs is packed."""
    start, layout = description.rest
    for_device = block[:start]
    trees = [Packed(for_device, *place) for place in description.trees]
    parts = with_trees(layout.of(block[start:]), trees)
    return parts[0] if description.is_whole else MicroBatches(parts)
