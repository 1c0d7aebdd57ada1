"""A batch on its way to a device; its one copy is held by tests/pretended."""

import pickle
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gmeta.data.transfer import (
    ALIGNMENT_BYTES,
    Packed,
    lay_out,
    map_tree,
    move_to_device,
    pack,
    send_to_device,
    unpack,
)


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
    tree = map_tree(some_tree(), lambda one: one * 2)
    assert isinstance(tree.parts[1], Pair)
    assert tree.pair.first.tolist() == tree.parts[0].first.tolist() == [0, 2, 4]
    assert tree.parts[1].first.tolist() == [2.0, 2.0]
    assert [tree.pair.number, *(part.number for part in tree.parts)] == [7, 8, 9]
    assert (tree.nothing, tree.name) == (None, "name")


def test_on_the_cpu_the_tensors_stay_where_they_are() -> None:
    tree = some_tree()
    there = move_to_device(tree, torch.device("cpu"))
    assert there.pair.first is tree.pair.first
    assert there.parts[1].first is tree.parts[1].first


def test_packed_trees_stand_in_one_block_and_what_is_shared_stands_once() -> None:
    trees = [some_tree(), Pair(torch.tensor([True, False]), 1)]
    first, second = found = pack(trees, pin_memory=False)
    assert first.full_block is second.full_block
    assert [str(unpack(one)) for one in found] == [str(tree) for tree in trees]
    shared = first.tree()
    begin = first.full_block.data_ptr()
    assert shared.pair.first.data_ptr() == shared.parts[0].first.data_ptr() == begin
    assert shared.parts[1].first.data_ptr() == begin + ALIGNMENT_BYTES
    assert second.tree().first.data_ptr() == begin + 2 * ALIGNMENT_BYTES
    assert first.full_block.numel() == 3 * ALIGNMENT_BYTES
    assert str(send_to_device(found, torch.device("cpu"))) == str(trees)


def tree_of(values: Tensor, number: int = 9, name: str = "name", shares: bool = True) -> Tree:
    shared = torch.arange(3)
    other = shared if shares else shared.clone()
    return Tree(Pair(shared, 7), (Pair(other, 8), Pair(values, number)), None, name)


@pytest.mark.parametrize(
    ("tree", "is_alike"),
    [
        (tree_of(torch.zeros(2)), True), (tree_of(torch.zeros(3)), False),
        (tree_of(torch.zeros(2, 1)), False), (tree_of(torch.zeros(2, dtype=torch.int32)), False),
        (tree_of(torch.zeros(2), number=10), False),
        (tree_of(torch.zeros(2), name="another"), False),
        (tree_of(torch.zeros(2), shares=False), False),
        (replace(tree_of(torch.zeros(2)), nothing=torch.ones(1)), False),
        (replace(tree_of(torch.zeros(2)), parts=()), False),
    ],
)  # fmt: skip
def test_a_layout_is_that_of_all_trees_of_other_values(tree: Tree, is_alike: bool) -> None:
    mine, _ = lay_out(some_tree())
    (there,) = pickle.loads(pickle.dumps(pack([tree], pin_memory=False)))
    assert isinstance(there, Packed)
    for other in (lay_out(tree)[0], there.layout):
        assert (mine == other, len({mine, other})) == (is_alike, 2 - is_alike)
    assert str(there.tree()) == str(tree)
