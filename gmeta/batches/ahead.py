"""Batches arranged by threads, in front of the step that they are for: on a GPU that computes, the
host would spend more time at arranging than at launching.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


def mapped_ahead(
    function: Callable[[Given], Found],
    items: Iterator[Given],
    threads: int,
    waited: Callable[[float], object] = lambda _: None,
) -> Iterator[Found]:
    """Yield the function's value of each item, in their order; so many threads work at those behind
    the one that is asked for. What the function raises, its item raises in the caller. `waited` is
    told the seconds that the caller waited for each.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="arrange") as pool:
        ahead: deque[Future[Found]] = deque()

        def first() -> Found:
            began_s = perf_counter()
            found = ahead.popleft().result()
            waited(perf_counter() - began_s)
            return found

        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield first()
        while ahead:
            yield first()
