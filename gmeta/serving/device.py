"""Where serving computes: the device that was asked for, whatever device the caller's own tensors
are made on.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from gmeta.errors import UserError

HOST = torch.device("cpu")
P = ParamSpec("P")
R = TypeVar("R")


def on_the_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with the CPU as its default device, whatever torch.set_default_device or
    a device as a context says."""

    @wraps(function)
    def run_on_cpu(*args: P.args, **kwargs: P.kwargs) -> R:
        # Looked at first: under a device as a context every call of torch takes a little longer.
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run_on_cpu


def parse_device(name: str) -> torch.device:
    """Return a device to compute on: cpu, cuda or cuda:N."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not (kind == "cuda" and index.isdecimal())):
        raise UserError(f"device {name!r} is unknown: cpu, cuda or cuda:N is allowed. Choose one")
    if kind == "cpu":
        return HOST
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise UserError(
            f"device {name!r} is not there: torch sees {count} GPUs. Use device='cpu', or install "
            "torch's CUDA build (docs/install.md)"
        )
    return torch.device(kind, int(index or 0))
