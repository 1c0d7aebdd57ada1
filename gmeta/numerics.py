"""How a run computes: in which precision, in which memory, and whether only in ways that give the
same bits.
"""

import ctypes
import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

BF16 = "bf16"
# glibc's malloc.h, and the largest threshold that it takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_THRESHOLD_BYTES = 32 << 20
# Linux's mman-common.h, and the size of its huge pages on x86 and most ARM.
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
HUGE_PAGE_BYTES = 2 << 20


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Products of matrices in bfloat16 where `precision` is "bf16"; values stay float32.

    Without torch's cache of cast weights: inner steps differentiate through the casts, and parts of
    a step free their graphs.
    """
    if precision != BF16:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def make_deterministic() -> None:
    """From now on torch takes only ways that give the same bits again, or raises RuntimeError."""
    # What cuBLAS asks for by torch's notes on reproducibility, or it refuses.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling what is not yet written helps to find reads of it, and costs a pass.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def keep_freed_memory() -> bool:
    """From now on malloc keeps what is freed for the next step; returns whether it can be told so.

    glibc gives large blocks back to the system, which then zeroes every page again when it is first
    touched: a step allocates tens of megabytes, and this took a tenth of its time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False  # another C library
    kept = mallopt(M_MMAP_THRESHOLD, MOST_THRESHOLD_BYTES)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def use_huge_pages(values: Tensor) -> bool:
    """Have the system back these values by huge pages, where it can; returns whether it will.

    Rows of a large table lie on as many pages. With ordinary ones nearly every row that is read or
    written first misses the processor's cache of page addresses: that doubled the time of a lookup
    (tables of 8 million rows of 32, benchmarks/peers_movielens.py). Contents stay as they are.
    """
    first = -(-values.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (values.data_ptr() + values.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if sys.platform != "linux" or values.is_cuda or end <= first:
        return False
    madvise = ctypes.CDLL(None).madvise
    place = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
    if madvise(*place, MADV_HUGEPAGE):
        return False
    # At once (Linux 6.1); before that the system goes about it while the run goes on.
    madvise(*place, MADV_COLLAPSE)
    return True
