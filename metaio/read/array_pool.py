"""Recycles the memory of arrays, so that batches are not made in fresh pages."""

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt


# The system clears each page of fresh memory, which takes as long as copying a batch into it:
# without the pool an epoch of bundles takes a sixth longer.
class ArrayPool:
    """Reuses the memory of arrays that are no longer referenced. Thread-safe."""

    def __init__(self, keep: int) -> None:
        # Most free pieces that wait under each name.
        self._keep = keep
        self._free: dict[str, deque[npt.NDArray[np.uint8]]] = {}

    def allocate(self, name: str, shape: tuple[int, ...], kind: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialised array, in the freed memory of an earlier one if there is any."""
        num_bytes = math.prod(shape) * np.dtype(kind).itemsize
        free = self._free.setdefault(name, deque(maxlen=self._keep))
        memory = _piece(free, num_bytes)
        # A view keeps the owner of its memory alive, not the views between. An array over a
        # memoryview counts as an owner: its finalizer runs once no view of it is left.
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
