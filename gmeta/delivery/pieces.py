"""Long work of a thread in pieces so short that the requests beside it are not held up."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_PIECE_S = 0.0005
_REST_S = 0.012


@contextmanager
def in_small_pieces() -> Iterator[None]:
    """Make this thread rest for 12 ms whenever a call in the block begins or ends half a
    millisecond after its last rest.

    Python lets a thread keep the interpreter for 5 ms once it has it, and every operation of torch
    in another thread gives it away: a request beside a load would wait for most of it.
    """
    rested_s = time.perf_counter()

    def rest(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal rested_s
        if time.perf_counter() - rested_s >= _PIECE_S:
            time.sleep(_REST_S)
            rested_s = time.perf_counter()

    # The only hook that Python calls so often; it is this thread's alone.
    before = sys.getprofile()
    sys.setprofile(rest)
    try:
        yield
    finally:
        sys.setprofile(before)
