"""Batches arranged by threads, in front of the step that they are for: on a GPU that computes, the
host would spend more time at arranging than at launching.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


def mapped_ahead(
    function: Callable[[Given], Found], items: Iterator[Given], threads: int
) -> Iterator[Found]:
    """Yield the function's value of each item, in their order; so many threads work at those behind
    the one that is asked for. What the function raises, its item raises in the caller.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="arrange") as pool:
        ahead: deque[Future[Found]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
