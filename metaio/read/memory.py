"""Memory that batches use one after another."""

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from metaio.ragged import offsets

Shape = tuple[int, ...]
_ALIGNMENT = 64


class Memory:
    """Memory of arrays that nobody holds any more, for the next ones.

    The system clears each page of fresh memory, which takes as long as copying a batch into it. At
    most `keep` pieces wait to be used again. Safe to use from several threads.
    """

    def __init__(self, keep: int) -> None:
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=keep)

    def empty(self, *wanted: tuple[Shape, npt.DTypeLike]) -> list[npt.NDArray[Any]]:
        """Return arrays of these shapes and types with any content; together they are one piece."""
        kinds = [(shape, np.dtype(kind)) for shape, kind in wanted]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in kinds]
        places = offsets([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()
        memory = self._piece(places[-1])
        # Of a memoryview: arrays hold the array that they are a part of only if that one is no part
        # of another array. So `whole` lives as long as one of them.
        whole = np.frombuffer(memory.data, dtype=np.uint8)
        weakref.finalize(whole, self._free.append, memory).atexit = False
        return [
            whole[place : place + size].view(kind).reshape(shape)
            for place, size, (shape, kind) in zip(places, sizes, kinds, strict=False)
        ]

    def _piece(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        while self._free:
            try:
                memory = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if len(memory) >= num_bytes:
                return memory
        # Somewhat more, as the next batch may be somewhat larger.
        return np.empty(max(num_bytes + num_bytes // 8, 1), dtype=np.uint8)
