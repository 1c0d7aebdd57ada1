"""What attention over slices sends and keeps, by arithmetic: of one layer and one rank.

A block is the queries of a rank's slices, or its keys, or its values: tasks x heads x places x
width numbers. docs/scaling.md has the formulas."""

from typing import NamedTuple


class SliceSize(NamedTuple):
    """This rank's slices of sequences."""

    tasks: int
    heads: int
    places: int
    width: int  # of a head
    number_bytes: int = 4

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one number for each query."""
        return self.tasks * self.heads * self.places * self.number_bytes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self.row_bytes * self.width


def attention_bytes(
    size: SliceSize, sharing: int, line: int, place: int, is_softmax: bool = True
) -> tuple[int, int]:
    """Return the bytes that a rank sends forward and backward.

    Args:
        sharing, line: of `split_ranks`: ranks that share heads, and groups of them.
        place: of this rank's group in the line."""
    block = size.block_bytes
    swapped = 4 * block * (sharing - 1) // sharing  # query, key, value, and the output back
    behind = line - 1 - place
    forward = 2 * block * (place + 1) if behind else 0
    # Queries, the gradients of their outputs, and of softmax two numbers each: of this rank and
    # those behind it, but not from the first rank. And gradients of the queries of those behind.
    met = 2 * block + (2 * size.row_bytes if is_softmax else 0)
    backward = (met * (behind + 1) if place else 0) + block * behind
    return swapped + forward, swapped + backward


def saved_bytes(size: SliceSize, is_softmax: bool = True) -> int:
    """Return the bytes that attention keeps for its gradient, the same for every kind of sharding:
    query, key, value, of softmax also the output and the logarithm of its total."""
    if is_softmax:
        return 4 * size.block_bytes + size.row_bytes
    return 3 * size.block_bytes + size.places * size.number_bytes  # how many each place sees


def target_bytes(rows: int, heads: int, width: int, ranks: int, number_bytes: int = 4) -> int:
    """Return the bytes that a rank sends forward for target attention of the rows of all tasks,
    padded to the most that one has: whatever the length is."""
    return 2 * (ranks - 1) * -(-rows * heads // ranks) * (width + 1) * number_bytes


def state_bytes(size: SliceSize) -> int:
    """Return the bytes that a rank sends for linear attention, each way: but for the last forward,
    the first backward."""
    return size.tasks * size.heads * size.width * (size.width + 1) * size.number_bytes


def moved_bytes(own_tasks: int, size: SliceSize, ranks: int) -> int:
    """Return the bytes that a rank sends for `encode_over_ranks` and its gradient besides: its own
    tasks' inputs to the others and the others' states back, and the gradients of both."""
    of_task = size.places * size.heads * size.width * size.number_bytes
    return 2 * of_task * (own_tasks * (ranks - 1) + size.tasks - own_tasks)


def pooling_bytes(
    own_tasks: int, tasks: int, places: int, rows: int, width: int, ranks: int
) -> int:
    """Return the bytes that a rank sends for `pool_over_ranks` and its gradient, of float32: its
    own tasks' events and targets to the others, the gradients of the others' back, and the sum of
    what all ranks make of their slices, both ways."""
    moved = (places + rows) * (own_tasks * (ranks - 1) + tasks - own_tasks)
    return 4 * width * (moved + 4 * (ranks - 1) * tasks * rows // ranks)
