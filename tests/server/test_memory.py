"""What a worker's tensors give back is there for the next batch."""

import resource
from collections.abc import Callable

import pytest
import torch

from gmeta.server.memory import keep_freed_memory
from tests.processes import with_imports_ready

ROUNDS, TENSORS, FLOATS = 10, 6, 3 << 20  # 12 MiB each
PAGES = TENSORS * FLOATS * 4 // resource.getpagesize()


def new_pages(prepare: Callable[[], object]) -> int:
    """Pages that the kernel gives in all rounds but the first two."""
    prepare()
    before = 0
    for number in range(ROUNDS + 2):
        if number == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.zeros(FLOATS) for _ in range(TENSORS)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_kept_for_the_next_batch() -> None:
    # Each in a process of its own: the setting is one of the process, and cannot be taken back.
    with with_imports_ready().Pool(2, maxtasksperchild=1) as pool:
        usual, kept = pool.map(new_pages, [int, keep_freed_memory], chunksize=1)
    if usual < ROUNDS * PAGES / 2:
        pytest.skip(f"this C library keeps freed memory by itself: {usual} new pages")
    assert kept < PAGES
