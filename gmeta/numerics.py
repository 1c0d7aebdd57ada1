"""How a run computes: in which precision, and whether only in ways that give the same bits."""

import os
from contextlib import AbstractContextManager

import torch

BF16 = "bf16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Products of matrices in bfloat16 where `precision` is "bf16"; values stay float32.

    Without torch's cache of cast weights: inner steps differentiate through the casts, and parts of
    a step free their graphs.
    """
    return torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=precision == BF16, cache_enabled=False
    )


def make_deterministic() -> None:
    """From now on torch takes only ways that give the same bits again, or raises RuntimeError."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling what is not yet written helps to find reads of it, and costs a pass.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
