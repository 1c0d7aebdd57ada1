"""An arranged batch on its way from one process to another: all its tensors in one block of memory
that both see, and beside it where each of them stands."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes, device_trees, with_trees
from gmeta.data.transfer import Packed, TreeLayout, pack


class BlockDescription(NamedTuple):
    """All that is to be known of a block: a few hundred numbers, which are pickled."""

    num_bytes: int
    trees: list[
        tuple[int, TreeLayout[Any]]
    ]  # what a device needs of each part: its start and layout
    rest: tuple[
        int, TreeLayout[tuple[Episodes, ...]]
    ]  # what stays on the host: the parts without it
    is_whole: bool  # the step is taken in one part


def write_to_block(
    episodes: Episodes | MicroBatches, memory: Callable[[int], Tensor]
) -> BlockDescription:
    """Copy a batch on the host into the memory that `memory` gives for a number of bytes."""
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
    """Return the batch, whose tensors are views of a block with the same bytes; what a device needs
    is `packed`."""
    start, layout = description.rest
    for_device = block[:start]
    trees = [Packed(for_device, *place) for place in description.trees]
    parts = with_trees(layout.of(block[start:]), trees)
    return parts[0] if description.is_whole else MicroBatches(parts)
