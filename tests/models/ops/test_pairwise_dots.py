"""Dot products of pairs: the numbers and every derivative of plain indexing."""

import pytest
import torch
from torch import Tensor

from gmeta_models.ops.pairwise_dots import PairwiseDots


def by_indexing(vectors_NFD: Tensor) -> Tensor:
    num_vectors = vectors_NFD.shape[1]
    row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    return torch.bmm(vectors_NFD, vectors_NFD.mT)[:, row, column]


@pytest.mark.parametrize("shape", [(5, 4, 3), (1, 2, 1), (0, 3, 2), (3, 1, 2)])
def test_values_and_derivatives_are_those_of_indexing(shape: tuple[int, ...]) -> None:
    dots = PairwiseDots(shape[1])
    vectors = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for found, exact in zip(
        derivatives(dots, vectors), derivatives(by_indexing, vectors), strict=True
    ):
        torch.testing.assert_close(found, exact)


def derivatives(dots: object, vectors: Tensor) -> list[Tensor]:
    """The value of a function that is not quadratic in the dot products, and three derivatives."""
    assert callable(dots)
    found = [dots(vectors)]
    for _ in range(3):
        value = found[-1].sin().mul(torch.linspace(1, 2, found[-1].numel()).view_as(found[-1]))
        found += torch.autograd.grad(value.sum() + 0.0 * vectors.sum(), vectors, create_graph=True)
    return found


def test_nothing_of_it_is_in_a_state_dict() -> None:
    assert not PairwiseDots(4).state_dict()


def test_it_works_inside_torch_func() -> None:
    dots, vectors = PairwiseDots(4), torch.randn(6, 5, 4, 3)

    def loss(vectors_NFD: Tensor) -> Tensor:
        return dots(vectors_NFD).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss))(vectors)
    exact = torch.stack([torch.func.grad(loss)(each) for each in vectors])
    torch.testing.assert_close(found, exact)


def test_in_bfloat16_it_is_differentiated_in_bfloat16() -> None:
    dots, vectors = PairwiseDots(4), torch.randn(5, 4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = dots(vectors)
    assert found.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(found.float().sum(), vectors)
    (exact,) = torch.autograd.grad(by_indexing(vectors).sum(), vectors)
    torch.testing.assert_close(grad, exact, rtol=0.05, atol=0.1)
