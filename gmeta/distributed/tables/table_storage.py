"""Memory for rows that a device does not hold: the host's, or a file that is mapped.

Shape suffixes: U unique ids, R rows of tables, D embedding width"""

import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from gmeta.distributed.tables.rows_to_send import Ints
from gmeta.errors import NotWrittenError

PAGE_BYTES = mmap.PAGESIZE


class StoredRows(ABC):
    """One number or more of each of a group's rows, beyond the device."""

    values_RD: Tensor
    scattered_RD: Tensor  # the same memory, to read rows here and there

    @abstractmethod
    def prefetch(self, row_U: Ints) -> None:
        """Begin to read these rows, in ascending order, where that takes time."""


@final
class HostRows(StoredRows):
    """Zeros in memory of the host, at first."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        # Not pinned: rows are gathered into pinned memory, a step's at a time.
        self.values_RD = self.scattered_RD = torch.zeros(*shape, dtype=dtype, device="cpu")

    def prefetch(self, row_U: Ints) -> None:
        """Do nothing: memory takes no time."""


@final
class MappedRows(StoredRows):
    """Zeros in a scratch file, at first. Raises NotWrittenError: the disk has no room for it."""

    def __init__(self, folder: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._row_bytes = shape[1] * dtype.itemsize
        num_values = shape[0] * shape[1]
        num_bytes = max(num_values * dtype.itemsize, PAGE_BYTES)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # Without a name: it is gone with the process, however that ends.
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as the rows
            # All of it now: a disk that is full later would kill the process by a signal.
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except OSError as error:
            raise NotWrittenError(
                f"tables cannot be kept in a file in {folder}, which takes "
                f"{num_bytes / 1e9:,.1f} GB there for this rank's next part: {error.strerror}",
                "Free some, or name another folder in sharding.file_dir",
            ) from error
        whole, scattered = (mmap.mmap(self._file.fileno(), num_bytes) for _ in range(2))
        # A page fault would read those around it, as a checkpoint wants, and push out others.
        scattered.madvise(mmap.MADV_RANDOM)
        self.values_RD, self.scattered_RD = (
            torch.frombuffer(memory, dtype=dtype, count=num_values).view(*shape)
            for memory in (whole, scattered)
        )

    def prefetch(self, row_U: Ints) -> None:
        """Begin to read the pages of these rows."""
        # All at once, so that a disk works on many; page faults would wait for one after another.
        first_U = row_U * self._row_bytes // PAGE_BYTES
        last_U = ((row_U + 1) * self._row_bytes - 1) // PAGE_BYTES
        begins = np.append(True, first_U[1:] > last_U[:-1] + 1)
        ends = np.append(begins[1:], True)
        for first, last in zip(first_U[begins].tolist(), last_U[ends].tolist(), strict=True):
            start, length = first * PAGE_BYTES, (last - first + 1) * PAGE_BYTES
            # Not the map's madvise, which would keep the interpreter while a full disk queue or
            # memory limit has it wait.
            os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


class TableStorage(NamedTuple):
    """Where the rows of a table and their optimizer's state are kept, and the share of them that
    the cache holds."""

    placement: str  # host or file
    folder: str  # of the scratch files
    cache_share: float

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> StoredRows:
        """Return memory of this shape [R, D], zeros."""
        if self.placement == "host":
            return HostRows(shape, dtype)
        return MappedRows(self.folder, shape, dtype)
