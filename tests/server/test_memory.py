"""What a worker gives back is there for the next batch."""

import ctypes
import multiprocessing as mp
import resource
from collections.abc import Callable

import pytest

from gmeta.server.memory import keep_freed_memory

ROUNDS, BLOCKS, BYTES = 10, 6, 1 << 20
PAGES = BLOCKS * BYTES // resource.getpagesize()
MMAP_THRESHOLD = -3


def as_at_first() -> None:
    """With the threshold that glibc begins with, which it moves by what a process has done."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 128 << 10)


def kept() -> None:
    as_at_first()
    assert keep_freed_memory()


def new_pages(prepare: Callable[[], object]) -> int:
    """Pages that the kernel gives in all rounds but the first."""
    prepare()
    before = 0
    for number in range(ROUNDS + 1):
        if number == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        used = [bytearray(BYTES) for _ in range(BLOCKS)]
        del used
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_kept_for_the_next_batch() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        assert not keep_freed_memory()
        pytest.skip("this C library is not glibc")
    # Each in a process of its own: the setting is one of the process, and cannot be taken back.
    with mp.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        anew, again = pool.map(new_pages, [as_at_first, kept], chunksize=1)
    assert anew >= ROUNDS * PAGES
    assert again < PAGES
