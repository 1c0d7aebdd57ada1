"""Work of several threads whose results come in order, and how much of it fits into memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Progress = Callable[[str, int, int], None]  # phase, rows done, rows in all
Item = TypeVar("Item")
Result = TypeVar("Result")

# A bucket is held about three times over: as read, the keys and ranks that sort it (which of narrow
# rows are as large), and one block of it as rows, positions and Arrow arrays.
_COPIES_OF_A_BUCKET = 3
_MIN_PARTS_TO_MERGE = 16


def count_parallel_buckets(memory_bytes: int, threads: int, largest_bytes: int) -> int:
    """Return how many buckets may be built at a time within the memory allowed."""
    # A task of two million rows makes a bucket of its own size: then fewer are built at once.
    at_once = memory_bytes // (_COPIES_OF_A_BUCKET * max(largest_bytes, 1))
    return max(1, min(threads, at_once))


def should_merge(sizes: Sequence[int]) -> bool:
    """Tell whether parts of these sizes are to be merged: once there are some, and those behind the
    first hold half as many entries as it. So memory follows the number of distinct entries, and the
    work that of all: merged every few parts, ten million distinct ones took minutes."""
    return len(sizes) > _MIN_PARTS_TO_MERGE and 2 * sum(sizes[1:]) >= sizes[0]


def map_in_order(
    threads: int, function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield `function` of each item in order, with `threads` at work and two more waiting."""
    # In order, whatever thread is first: the order of shards is part of the result.
    with ThreadPoolExecutor(threads, thread_name_prefix="metaio-prepare") as pool:
        queue: deque[Future[Result]] = deque()
        for item in items:
            queue.append(pool.submit(function, item))
            if len(queue) >= threads + 2:
                yield queue.popleft().result()
        while queue:
            yield queue.popleft().result()
