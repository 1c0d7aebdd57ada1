"""How a worker's memory is kept between batches."""

import ctypes

# Of mallopt(3), with what they become. Trimming: how much of what is free is kept at most. Padding:
# how much is asked for at once. Mapping: from where on memory is mapped, the most that glibc takes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_TRIM_THRESHOLD: 256 << 20, _TOP_PAD: 32 << 20, _MMAP_THRESHOLD: 32 << 20}


def keep_freed_memory() -> bool:
    """Keep up to 256 MB of what tensors gave back, rather than asking the system for it again with
    every batch: the kernel's zeros in fresh pages took a quarter of a large batch's time. Return
    False where the C library is not glibc, which alone can be told so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(what, to) == 1 for what, to in _SETTINGS.items())
