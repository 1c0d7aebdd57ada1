"""How a run computes: in which precision, in which memory, and whether deterministically."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from gmeta.errors import ConfigError

BF16, TF32 = "bf16", "tf32"
# glibc's malloc.h, and the largest threshold that it takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_THRESHOLD_BYTES = 32 << 20


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which matrices are multiplied in bfloat16, if `precision` is "bf16"."""
    if precision != BF16:
        return nullcontext()
    # Values stay float32. Without the cache of cast weights: inner steps differentiate through the
    # casts, and parts of a step free their graphs.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


@contextmanager
def multiply_in_float32(device: torch.device) -> Iterator[None]:
    """Multiply matrices of float32 as float32 in the block, whatever the run's precision."""
    is_half = torch.is_autocast_enabled(device.type)
    matmul = torch.backends.cuda.matmul if device.type == "cuda" else None
    before = matmul.fp32_precision if matmul is not None else ""
    with torch.autocast(device.type, enabled=False) if is_half else nullcontext():
        try:
            if matmul is not None:
                matmul.fp32_precision = "ieee"
            yield
        finally:
            if matmul is not None:
                matmul.fp32_precision = before


def choose_products(precision: str, device: torch.device) -> None:
    """Have CUDA multiply matrices of float32 in TF32 from now on, or not, as `precision` says."""
    if precision == TF32 and device.type != "cuda":
        raise ConfigError(
            f'run.precision = "{TF32}" needs CUDA, and this run computes on the {device.type}: '
            f'only Nvidia GPUs multiply in it. Set "float32" or "{BF16}", or run.device = "cuda"'
        )
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == TF32 else "ieee"


def make_deterministic() -> None:
    """Have torch use only operations that give the same bits every time, or raise RuntimeError."""
    # What cuBLAS asks for by torch's notes on reproducibility, or it refuses.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling uninitialised memory helps to find reads of it, and costs a pass.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed what a model draws in a step, such as its dropout, by these numbers alone."""
    # So a resumed run draws the same, and ranks do not.
    mixed = ((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63
    # torch.manual_seed would look for every kind of device, in each step.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(mixed)


def keep_freed_memory(at_most: int = 2**31 - 1) -> bool:
    """Have malloc keep up to `at_most` freed bytes; return whether it can."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False  # another C library
    # glibc gives large blocks back to the system, which zeroes every page again at its next use.
    # Without this a step of 26 tables x 32 has 4,000 page faults in place of 60 and takes a fifth
    # longer; a large batch of requests a quarter.
    kept = mallopt(M_MMAP_THRESHOLD, MOST_THRESHOLD_BYTES)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, at_most))
