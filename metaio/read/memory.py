"""Memory that batches use one after another."""

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt


class Memory:
    """Memory of arrays that nobody holds any more, for the next ones.

    The system clears each page of fresh memory, which takes as long as copying a batch into it. Of
    each name at most `keep` pieces wait to be used again. Safe to use from several threads.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: dict[str, deque[npt.NDArray[np.uint8]]] = {}

    def empty(self, name: str, shape: tuple[int, ...], kind: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with any content, in memory of an earlier one of that name if there is
        such.
        """
        num_bytes = math.prod(shape) * np.dtype(kind).itemsize
        free = self._free.setdefault(name, deque(maxlen=self._keep))
        memory = _piece(free, num_bytes)
        # Of a memoryview: arrays hold the array that they are a part of only if that one is no part
        # of another array. So `whole` lives as long as any of them.
        whole = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(whole, free.append, memory).atexit = False
        return whole[:num_bytes].view(kind).reshape(shape)


def _piece(free: deque[npt.NDArray[np.uint8]], num_bytes: int) -> npt.NDArray[np.uint8]:
    while free:
        try:
            # The newest: what of it is still in the processor's cache need not be fetched to be
            # written to.
            memory = free.pop()
        except IndexError:  # another thread was faster
            break
        if len(memory) >= num_bytes:
            return memory
    # Somewhat more, as the next batch may be somewhat larger.
    return np.empty(num_bytes + num_bytes // 8 + 1, dtype=np.uint8)
