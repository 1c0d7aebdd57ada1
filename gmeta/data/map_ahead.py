"""A map that threads work on ahead of its consumer."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

Item = TypeVar("Item")
Mapped = TypeVar("Mapped")


def map_ahead(
    function: Callable[[Item], Mapped],
    items: Iterator[Item],
    threads: int,
    on_wait: Callable[[float], object] = lambda _: None,
    on_thread_start: Callable[[], object] = lambda: None,
) -> Iterator[Mapped]:
    """Yield the function's value of each item, in order, while `threads` threads work ahead."""
    # Beside a GPU the host would spend more time on collating than on launching. An error of the
    # function is raised in the caller; `on_wait` gets the seconds of each wait.
    with ThreadPoolExecutor(threads, "arrange", on_thread_start) as pool:
        ahead: deque[Future[Mapped]] = deque()

        def first() -> Mapped:
            began_s = perf_counter()
            found = ahead.popleft().result()
            on_wait(perf_counter() - began_s)
            return found

        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield first()
        while ahead:
            yield first()
