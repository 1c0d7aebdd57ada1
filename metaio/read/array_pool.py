"""Memory that one batch after another is made in."""

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt


class ArrayPool:
    """Reuses the memory of arrays that nobody holds any more. The system clears each page of fresh
    memory, which takes as long as copying a batch into it: an epoch of bundles takes a sixth longer
    without. At most `keep` free pieces wait under each name. Safe to use from several threads."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: dict[str, deque[npt.NDArray[np.uint8]]] = {}

    def allocate(self, name: str, shape: tuple[int, ...], kind: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with any content, in memory of an earlier one of that name if some is
        free."""
        num_bytes = math.prod(shape) * np.dtype(kind).itemsize
        free = self._free.setdefault(name, deque(maxlen=self._keep))
        memory = _piece(free, num_bytes)
        # A view keeps alive the array that owns its memory, and no view between. Made of a
        # memoryview, `whole` counts as an owner: it lives as long as any view of it.
        buffer = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(buffer, free.append, memory).atexit = False
        return buffer[:num_bytes].view(kind).reshape(shape)


def _piece(free: deque[npt.NDArray[np.uint8]], num_bytes: int) -> npt.NDArray[np.uint8]:
    while free:
        try:
            # The newest: some of it is still in the processor's cache.
            memory = free.pop()
        except IndexError:  # another thread was faster
            break
        if len(memory) >= num_bytes:
            return memory
    # Somewhat more, as the next batch may be somewhat larger.
    return np.empty(num_bytes + num_bytes // 8 + 1, dtype=np.uint8)
