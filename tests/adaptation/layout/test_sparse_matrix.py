"""Weighted sums of rows against a loop, and their derivatives against autograd's own."""

import random

import pytest
import torch
from torch import Tensor

from gmeta.adaptation.layout.sparse_matrix import Bags


def some_bags(lengths: list[int], num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices with repeats, lengths and weights."""
    rng = random.Random(0)
    index_V = torch.tensor([rng.randrange(num_rows) for _ in range(sum(lengths))])
    generator = torch.Generator().manual_seed(0)
    weight_V = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    return index_V.long(), torch.tensor(lengths, dtype=torch.int64), weight_V


def slow_sums(rows_PD: Tensor, index_V: Tensor, lengths_C: Tensor, weight_V: Tensor) -> Tensor:
    weighted = (rows_PD[index_V] * weight_V[:, None]).split(lengths_C.tolist())
    return torch.stack([bag.sum(dim=0) for bag in weighted])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("num_entries", [0, 9])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [0, 0], [4], [1, 0, 1], [1, 1]])
def test_sums_and_first_and_second_derivatives_equal_a_loop(
    lengths: list[int], weighted: bool, num_entries: int, device: str
) -> None:
    index_V, lengths_C, weight_V = some_bags(lengths, 5)
    rows_PD = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    given_V = weight_V if weighted else None
    weight_V = weight_V if weighted else torch.ones_like(weight_V)
    bags = Bags.of(index_V, lengths_C, given_V, 5, num_entries=num_entries, device=device)
    torch.testing.assert_close(bags.pool(rows_PD), slow_sums(rows_PD, index_V, lengths_C, weight_V))
    assert torch.autograd.gradcheck(bags.pool, rows_PD)
    assert torch.autograd.gradgradcheck(lambda rows: bags.pool(rows).square(), rows_PD)


def test_constant_sums_are_the_same_and_are_never_differentiated() -> None:
    index_V, lengths_C, weight_V = some_bags([2, 0, 3, 1], 5)
    rows_PD = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    bags = Bags.of(index_V, lengths_C, weight_V, 5, constant=True)
    with torch.no_grad():
        sums_CD = bags.pool(rows_PD)
    torch.testing.assert_close(sums_CD, slow_sums(rows_PD, index_V, lengths_C, weight_V))
    assert bags.backward is None
    with pytest.raises(ValueError, match="arranged as constants"):
        bags.pool(rows_PD)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("num_rows", [40, 200_000])
def test_the_transpose_sums_what_a_scatter_does(num_rows: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    index_V = torch.randint(0, num_rows, (500,), generator=generator)
    rows_PD = torch.randn(num_rows, 2, dtype=torch.float64, requires_grad=True)
    gathered = Bags.single(index_V, num_rows, device=device).pool(rows_PD)
    assert torch.equal(gathered, rows_PD[index_V])
    upstream = torch.randn(500, 2, generator=generator, dtype=torch.float64)
    (grad_PD,) = torch.autograd.grad(gathered, rows_PD, upstream)
    torch.testing.assert_close(grad_PD, torch.zeros_like(rows_PD).index_add(0, index_V, upstream))
