"""A batch on its way from the host to a device: all its tensors in one copy.

A step has a dozen to forty tensors, and a copy of each would cost more in calls than in bytes. They
travel as one block of pinned memory, on a stream of its own: the host waits for nothing, and the
copy runs beside the step before. torch's allocator of pinned memory gives a block out again when
its copy is done.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Of each tensor in the block; any kernel's vector loads are content with it.
ALIGNMENT_BYTES = 64


def moved(tree: T, device: torch.device) -> T:
    """Return dataclasses and tuples of tensors, however deep, with the tensors on a device."""
    if device.type != "cuda":
        return mapped(tree, lambda tensor: tensor.to(device))
    found: dict[int, Tensor] = {}

    def find(tensor: Tensor) -> Tensor:
        found[id(tensor)] = tensor
        return tensor

    mapped(tree, find)
    there = dict(zip(found, _in_one_copy(list(found.values()), device), strict=True))
    return mapped(tree, lambda tensor: there[id(tensor)])


def mapped(tree: T, function: Callable[[Tensor], Tensor]) -> T:
    """Return dataclasses and tuples with each tensor in them replaced by the function's value."""

    def of(part: Any) -> Any:
        if isinstance(part, Tensor):
            return function(part)
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{one.name: of(getattr(part, one.name)) for one in fields(part)})
        if isinstance(part, tuple):
            parts = map(of, part)
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        return part

    result: T = of(tree)
    return result


def _in_one_copy(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on a device, as views of one block there."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def places(block: Tensor) -> list[Tensor]:
        return [
            block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    packed = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for place, tensor in zip(places(packed), tensors, strict=True):
        place.copy_(tensor)
    computing, copying = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copying):
        block = packed.to(device, non_blocking=True)
    computing.wait_stream(copying)
    block.record_stream(computing)  # or its memory would be given out while a step reads it
    return places(block)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
