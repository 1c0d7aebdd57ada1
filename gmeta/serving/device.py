"""Serving computes on the CPU, whatever device the caller's own tensors are made on."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_the_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with the CPU as its default device, whatever torch.set_default_device or
    a device as a context says.
    """

    @wraps(function)
    def shielded(*args: P.args, **kwargs: P.kwargs) -> R:
        # Looked at first: under a device as a context every call of torch takes a little longer.
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return shielded
