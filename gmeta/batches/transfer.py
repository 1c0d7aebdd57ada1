"""A batch on its way from the host to a device: all its tensors in one copy.

A step has a dozen to forty tensors, and a copy of each would cost more in calls than in bytes. They
travel as one block of pinned memory, on a stream of its own: the host waits for nothing, and the
copy runs beside the step before. The thread that arranges a batch may fill the block (`packed`).
torch's allocator of pinned memory gives a block out again when its copy is done, which it learns
from an event: as many blocks are in turn as batches are under way.
"""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Of each tensor in the block; any kernel's vector loads are content with it.
ALIGNMENT_BYTES = 64


def moved(tree: T, device: torch.device) -> T:
    """Return dataclasses and tuples of tensors, however deep, with the tensors on a device."""
    if device.type != "cuda":
        return mapped(tree, lambda tensor: tensor.to(device))
    tensors = _tensors_of(tree)
    there = dict(zip(tensors, _in_one_copy(list(tensors.values()), device), strict=True))
    return mapped(tree, lambda tensor: there[id(tensor)])


def packed(tree: T) -> T:
    """Return the same with the tensors in one block of pinned memory, as `moved` copies it."""
    tensors = _tensors_of(tree)
    places = _packed(list(tensors.values()))
    there = dict(zip(tensors, places, strict=True))
    return mapped(tree, lambda tensor: there[id(tensor)])


class Place(NamedTuple):
    """Where a tensor stands in a block."""

    start: int  # in bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def in_one_block(tree: T, memory: Callable[[int], Tensor]) -> tuple[T, int]:
    """Copy all tensors into the memory that is given for so many bytes; return the same with the
    place of each instead, and how many bytes there are: what `out_of_block` takes, elsewhere.
    """
    tensors = _tensors_of(tree)
    views = _packed(list(tensors.values()), memory)
    places = [
        Place(int(view.storage_offset()) * view.element_size(), view.dtype, tuple(view.shape))
        for view in views
    ]
    there = dict(zip(tensors, places, strict=True))
    end = max((place.start + view.nbytes for place, view in zip(places, views, strict=True)))
    return mapped(tree, lambda tensor: there[id(tensor)]), end


def out_of_block(tree: T, block: Tensor) -> T:
    """Return what `in_one_block` was given, its tensors as views of a block."""

    def view(place: Place) -> Tensor:
        end = place.start + place.dtype.itemsize * math.prod(place.shape)
        return block[place.start : end].view(place.dtype).view(place.shape)

    return mapped(tree, view, Place)


def mapped(tree: T, function: Callable[[Any], Any], kind: type = Tensor) -> T:
    """Return dataclasses and tuples with each tensor in them, or whatever is of this kind, replaced
    by the function's value.
    """

    def of(part: Any) -> Any:
        if isinstance(part, kind):
            return function(part)
        made: Any = type(part)
        if names := _names_of_fields(made):
            return made(*[of(getattr(part, name)) for name in names])
        if isinstance(part, tuple):
            parts = map(of, part)
            return made(*parts) if hasattr(part, "_fields") else tuple(parts)
        return part

    result: T = of(tree)
    return result


@cache
def _names_of_fields(kind: type) -> tuple[str, ...]:
    """Return those of a dataclass; none of another class."""
    return tuple(one.name for one in fields(kind)) if is_dataclass(kind) else ()


def _tensors_of(tree: Any) -> dict[int, Tensor]:
    """Return each tensor once, by its identity."""
    found: dict[int, Tensor] = {}

    def find(tensor: Tensor) -> Tensor:
        found[id(tensor)] = tensor
        return tensor

    mapped(tree, find)
    return found


def _pinned_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _packed(
    tensors: list[Tensor], memory: Callable[[int], Tensor] = _pinned_memory
) -> list[Tensor]:
    """Return copies of tensors, one behind the other in the memory that is given for so many
    bytes.
    """
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    places = _views(memory(end), starts, tensors)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    return places


def _views(block: Tensor, starts: list[int], like: list[Tensor]) -> list[Tensor]:
    """Return what stands at these bytes of a block."""
    return [
        block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=True)
    ]


def _in_one_copy(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on a device, as views of one block there."""
    if not tensors:
        return []
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(memory) != 1 or not tensors[0].is_pinned():
        tensors = _packed(tensors)
    starts = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    on_host = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    computing, copying = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copying):
        block = on_host.to(device, non_blocking=True)
    computing.wait_stream(copying)
    block.record_stream(computing)  # or its memory would be given out while a step reads it
    return _views(block, starts, tensors)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
