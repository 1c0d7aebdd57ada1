"""The dot products of all pairs of a row's vectors, and derivatives of them that touch each value
once.

torch's derivative of `products[:, row, column]` adds one value after the other to a cleared matrix
a row. But with the gradient g of the pairs written as a symmetric matrix G of zero diagonal, that
of the vectors V is G V: a gather and one product; and what G passes on to g is a gather again.

Shape suffixes: N rows, F vectors of a row, D their width, P pairs.
"""

from typing import Any

import torch
from torch import Tensor, nn


class PairwiseDots(nn.Module):
    """v_i . v_j of all pairs i > j, in the order of i, then j."""

    pair_P: Tensor
    place_FF: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        row_P, column_P = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        # The pair at each place of the matrix of all dot products; on its diagonal one too many.
        place_FF = torch.full((num_vectors, num_vectors), row_P.numel())
        place_FF[row_P, column_P] = place_FF[column_P, row_P] = torch.arange(row_P.numel())
        # Not for checkpoints: they follow from the number of vectors.
        self.register_buffer("pair_P", row_P * num_vectors + column_P, persistent=False)
        self.register_buffer("place_FF", place_FF.flatten(), persistent=False)

    def forward(self, vectors_NFD: Tensor) -> Tensor:
        """[N, F, D] -> [N, P]."""
        device = vectors_NFD.device.type
        if torch.is_autocast_enabled(device):
            # Before, not inside: the derivative multiplies by the vectors.
            vectors_NFD = vectors_NFD.to(torch.get_autocast_dtype(device))
        dots_NP: Tensor = _Dots.apply(vectors_NFD, self.pair_P, self.place_FF)
        return dots_NP


class _Dots(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(vectors_NFD: Tensor, pair_P: Tensor, place_FF: Tensor) -> Tensor:
        return _pairs(torch.bmm(vectors_NFD, vectors_NFD.mT), pair_P)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        vectors_NFD, pair_P, place_FF = ctx.saved_tensors
        symmetric_NFF = _Symmetric.apply(grads[0], pair_P, place_FF)
        return torch.bmm(symmetric_NFF, vectors_NFD), None, None


class _Symmetric(torch.autograd.Function):
    """Pairs as a symmetric matrix of zero diagonal."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_NP: Tensor, pair_P: Tensor, place_FF: Tensor) -> Tensor:
        num_rows, num_vectors = grad_NP.shape[0], round(place_FF.numel() ** 0.5)
        with_zero = torch.cat([grad_NP, grad_NP.new_zeros(num_rows, 1)], dim=1)
        return with_zero.index_select(1, place_FF).view(num_rows, num_vectors, num_vectors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_NFF,), (pair_P, _) = grads, ctx.saved_tensors
        return _pairs(grad_NFF + grad_NFF.mT, pair_P), None, None


def _pairs(products_NFF: Tensor, pair_P: Tensor) -> Tensor:
    return products_NFF.flatten(1).index_select(1, pair_P)
