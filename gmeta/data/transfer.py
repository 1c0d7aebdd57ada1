"""A batch on its way from the host to a device: all its tensors in one block of memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor

# A step has a dozen to forty tensors: copying each would cost more in calls than in bytes. They
# travel as one block of pinned memory, on a stream of its own, beside the step before: the host
# waits for nothing. The thread that collates a batch fills the block. torch's allocator gives
# pinned memory out again when an event says that its copy is done.
T = TypeVar("T")
# Of each tensor in the block; enough for any kernel's vector loads.
ALIGNMENT_BYTES = 64


class TensorPlace(NamedTuple):
    """The place of a tensor in a block."""

    start: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Return the byte behind its last."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, block: Tensor) -> Tensor:
        """Return the tensor, as a view of the block."""
        return block[self.start : self.end].view(self.dtype).view(self.shape)


@final
class TreeLayout(Generic[T]):
    """How the tensors of a tree stand in a block: the tree itself, with a TensorPlace for each.
    Equal for trees that differ in the values of tensors alone."""

    def __init__(self, tree: Any, num_bytes: int) -> None:
        self.tree, self.num_bytes = tree, num_bytes
        # Flat: a step looks its graph up by it, and dataclasses compare themselves in Python.
        self._key = tuple(_iterate_tree(tree))
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TreeLayout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return TreeLayout, (self.tree, self.num_bytes)  # in another process types have other hashes

    def of(self, block: Tensor) -> T:
        """Return the tree, its tensors as views of the block."""
        tree: T = map_tree(self.tree, lambda place: place.of(block), TensorPlace)
        return tree


@final
@dataclass(frozen=True)
class Packed(Generic[T]):
    """A tree whose tensors stand in a block, which may hold others beside it."""

    full_block: Tensor  # uint8
    start: int
    layout: TreeLayout[T]

    @property
    def block(self) -> Tensor:
        """Return the tree's own part of the block."""
        return self.full_block[self.start : self.start + self.layout.num_bytes]

    def tree(self) -> T:
        """Return the tree, its tensors as views of the block."""
        return self.layout.of(self.block)


def lay_out(tree: T) -> tuple[TreeLayout[T], list[tuple[TensorPlace, Tensor]]]:
    """Return the layout of a tree of dataclasses and tuples in a block, and each tensor's place."""
    found: dict[int, tuple[TensorPlace, Tensor]] = {}
    end = 0

    def place(tensor: Tensor) -> TensorPlace:
        nonlocal end
        # A tensor that stands in the tree several times travels once.
        if id(tensor) not in found:
            found[id(tensor)] = TensorPlace(end, tuple(tensor.shape), tensor.dtype), tensor
            end += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return found[id(tensor)][0]

    in_places = map_tree(tree, place)
    return TreeLayout(in_places, end), list(found.values())


def pack(
    trees: Sequence[Any], pin_memory: bool = True, memory: Callable[[int], Tensor] | None = None
) -> list[Packed[Any]]:
    """Return copies of trees in one block of pinned memory, or in memory from `memory`, a function
    of the number of bytes."""
    laid = [lay_out(tree) for tree in trees]
    num_bytes = sum(layout.num_bytes for layout, _ in laid)
    if memory is None:
        full_block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    else:
        full_block = memory(num_bytes)
    start, found = 0, []
    for layout, tensors in laid:
        one: Packed[Any] = Packed(full_block, start, layout)
        for place, tensor in tensors:
            place.of(one.block).copy_(tensor)
        found.append(one)
        start += layout.num_bytes
    return found


def move_to_device(tree: T, device: torch.device) -> T:
    """Return dataclasses and tuples of tensors, however deep, with the tensors on a device."""
    found: T = unpack(send_to_device([tree], device)[0])
    return found


def send_to_device(trees: Sequence[Any], device: torch.device) -> list[Any]:
    """Return trees on a device; on a GPU packed, and those of one block in one copy."""
    if device.type != "cuda":
        return [map_tree(unpack(tree), lambda tensor: tensor.to(device)) for tree in trees]
    loose = [tree for tree in trees if not isinstance(tree, Packed)]
    now_packed = iter(pack(loose) if loose else ())
    parts = [tree if isinstance(tree, Packed) else next(now_packed) for tree in trees]
    there: dict[int, Tensor] = {}
    for part in parts:
        if id(part.full_block) not in there:
            there[id(part.full_block)] = _in_one_copy(part.full_block, device)
    return [replace(part, full_block=there[id(part.full_block)]) for part in parts]


def unpack(tree: T | Packed[T]) -> T:
    """Return a tree, its tensors as views of its block if it is packed."""
    return tree.tree() if isinstance(tree, Packed) else tree


def map_tree(tree: T, function: Callable[[Any], Any], kind: type = Tensor) -> T:
    """Return dataclasses and tuples with the function's value in place of each tensor, or of each
    part of another `kind`."""

    def of(part: Any) -> Any:
        if isinstance(part, kind):
            return function(part)
        own: Any = type(part)
        if names := _names_of_fields(own):
            return own(*[of(getattr(part, name)) for name in names])
        if isinstance(part, tuple):
            parts = map(of, part)
            return own(*parts) if hasattr(part, "_fields") else tuple(parts)
        return part

    result: T = of(tree)
    return result


@cache
def _names_of_fields(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind)) if is_dataclass(kind) else ()


def _iterate_tree(part: Any) -> Iterator[Any]:
    kind: Any = type(part)
    if names := _names_of_fields(kind):
        inside = [getattr(part, name) for name in names]
    elif isinstance(part, tuple) and kind is not TensorPlace:
        inside = list(part)
    else:
        yield part
        return
    yield kind, len(inside)
    for one in inside:
        yield from _iterate_tree(one)


def _in_one_copy(block: Tensor, device: torch.device) -> Tensor:
    computing, copying = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copying):
        there = block.to(device, non_blocking=True)
    computing.wait_stream(copying)
    there.record_stream(computing)  # or its memory would be given out while a step reads it
    return there


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
