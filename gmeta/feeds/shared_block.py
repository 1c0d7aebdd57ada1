"""Memory that two processes share, for one batch at a time."""

import mmap
import os
from typing import final

import torch
from torch import Tensor


@final
class SharedBlock:
    """One end of it."""

    # It has no name and lies in no folder: the system frees it when the last process that holds it
    # ends, in any way; and no size of /dev/shm limits it.
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def make(cls) -> "SharedBlock":
        """Return a new block, without a byte."""
        return cls(os.memfd_create("gmeta-batch"))

    def fileno(self) -> int:
        """Return the descriptor from which another process makes its end."""
        return self._descriptor

    def first(self, num_bytes: int) -> Tensor:
        """Return its first `num_bytes` bytes; it grows if it has fewer."""
        if num_bytes > self._memory.nbytes:
            if num_bytes > os.fstat(self._descriptor).st_size:
                # With room for a larger batch: to grow is to map the memory anew.
                os.ftruncate(self._descriptor, num_bytes + num_bytes // 4)
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, 0), dtype=torch.uint8)
        return self._memory[:num_bytes]

    def close(self) -> None:
        """Release the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self._descriptor)
