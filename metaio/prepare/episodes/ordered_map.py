"""Maps over threads with results in order, and decides how much of that fits into memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Progress = Callable[[str, int, int], None]  # phase, rows done, rows in all
Item = TypeVar("Item")
Result = TypeVar("Result")

# A bucket is held about three times: as read, as sort keys and ranks (as large for narrow rows),
# and one block of it as rows, positions and Arrow arrays.
_COPIES_OF_A_BUCKET = 3
_MIN_PARTS_TO_MERGE = 16


def count_parallel_buckets(memory_bytes: int, threads: int, largest_bytes: int) -> int:
    """Return how many buckets may be built at once within the memory allowed."""
    # One task of two million rows is a bucket of that size: then fewer are built at once.
    at_once = memory_bytes // (_COPIES_OF_A_BUCKET * max(largest_bytes, 1))
    return max(1, min(threads, at_once))


def should_merge(sizes: Sequence[int]) -> bool:
    """Return whether parts of these sizes are due to be merged."""
    # Once the parts behind the first hold half as much: memory follows the number of distinct
    # entries. Merged every few parts, ten million distinct ones took minutes.
    return len(sizes) > _MIN_PARTS_TO_MERGE and 2 * sum(sizes[1:]) >= sizes[0]


def map_in_order(
    threads: int, function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield `function` of each item in order, with `threads` at work and two more waiting."""
    # In order, since the order of shards is part of the result.
    with ThreadPoolExecutor(threads, thread_name_prefix="metaio-prepare") as pool:
        queue: deque[Future[Result]] = deque()
        for item in items:
            queue.append(pool.submit(function, item))
            if len(queue) >= threads + 2:
                yield queue.popleft().result()
        while queue:
            yield queue.popleft().result()
