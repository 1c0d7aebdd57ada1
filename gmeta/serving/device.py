"""The device that serving computes on, whatever device the caller's own tensors are made on."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from gmeta.errors import UserError

HOST = torch.device("cpu")
P = ParamSpec("P")
R = TypeVar("R")


def on_the_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with the CPU as its default device, whatever the caller's default is."""

    @wraps(function)
    def run_on_cpu(*args: P.args, **kwargs: P.kwargs) -> R:
        # Not set for the call: it is the default of all threads.
        if torch.get_default_dtype() != torch.float32:
            raise UserError(
                f"torch's default dtype is {torch.get_default_dtype()}; models compute in "
                "torch.float32. Call torch.set_default_dtype(torch.float32) before"
            )
        # Most callers have this default, and a device context slows every call of torch inside it.
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
    # Checked here: torch reports a missing GPU only when the first tensor is made on it.
    if int(index or 0) >= count:
        raise UserError(
            f"device {name!r} is not there: torch sees {count} GPUs. Use device='cpu', or install "
            "torch's CUDA build (docs/install.md)"
        )
    return torch.device(kind, int(index or 0))
