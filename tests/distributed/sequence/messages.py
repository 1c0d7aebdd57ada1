"""Counts what this rank sends, and what its gradients keep."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Sent:
    """Bytes that this rank has asked collectives to send to others."""

    def __init__(self) -> None:
        self.total = 0

    def take(self) -> int:
        """Those since the last call."""
        total, self.total = self.total, 0
        return total


@contextmanager
def counted_messages() -> Iterator[Sent]:
    sent = Sent()
    swap, gather, reduce, batch = (
        dist.all_to_all_single,
        dist.all_gather_into_tensor,
        dist.all_reduce,
        dist.batch_isend_irecv,
    )

    def all_to_all(
        out: Tensor, values: Tensor, receive: Any = None, send: Any = None, group: Any = None
    ) -> None:
        own = send[group.rank()] if send else len(values) // group.size()
        sent.total += bytes_of(values) - own * values[:1].numel() * values.element_size()
        swap(out, values, receive, send, group=group)

    def all_gather(out: Tensor, values: Tensor, group: Any) -> None:
        sent.total += bytes_of(values) * (group.size() - 1)
        gather(out, values, group=group)

    def all_reduce(values: Tensor, group: Any) -> None:
        sent.total += 2 * bytes_of(values) * (group.size() - 1) // group.size()
        reduce(values, group=group)

    def batched(moves: list[dist.P2POp]) -> Any:
        sent.total += sum(bytes_of(move.tensor) for move in moves if move.op is dist.isend)
        return batch(moves)

    with mock.patch.multiple(
        dist,
        all_to_all_single=all_to_all,
        all_gather_into_tensor=all_gather,
        all_reduce=all_reduce,
        batch_isend_irecv=batched,
    ):
        yield sent


@contextmanager
def counted_saved(besides: Iterable[Tensor] = ()) -> Iterator[dict[int, int]]:
    """The bytes of each tensor that operations in the block keep for their gradients."""
    saved: dict[int, int] = {}
    kept = []
    weights = {tensor.untyped_storage().data_ptr() for tensor in besides}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(storage)  # so that no other is put in its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
