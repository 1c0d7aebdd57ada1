"""A batch on its way to a device; its one copy is held by tests/pretended."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gmeta.batches.transfer import mapped, moved


class Pair(NamedTuple):
    first: Tensor
    number: int


@dataclass(frozen=True)
class Tree:
    pair: Pair
    parts: tuple[Pair, ...]
    nothing: Tensor | None
    name: str


def some_tree() -> Tree:
    shared = torch.arange(3)
    return Tree(Pair(shared, 7), (Pair(shared, 8), Pair(torch.ones(2), 9)), None, "name")


def test_every_tensor_is_replaced_and_nothing_else() -> None:
    tree = mapped(some_tree(), lambda one: one * 2)
    assert isinstance(tree.parts[1], Pair)
    assert tree.pair.first.tolist() == tree.parts[0].first.tolist() == [0, 2, 4]
    assert tree.parts[1].first.tolist() == [2.0, 2.0]
    assert [tree.pair.number, *(part.number for part in tree.parts)] == [7, 8, 9]
    assert (tree.nothing, tree.name) == (None, "name")


def test_on_the_cpu_the_tensors_stay_where_they_are() -> None:
    tree = some_tree()
    there = moved(tree, torch.device("cpu"))
    assert there.pair.first is tree.pair.first
    assert there.parts[1].first is tree.parts[1].first
