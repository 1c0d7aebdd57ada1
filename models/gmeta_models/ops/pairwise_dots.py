"""The dot products of all pairs of a row's vectors, with derivatives that touch each value once.

Shape suffixes: N rows, F single-id or pooled features, D embedding width"""

from typing import Any

import torch
from torch import Tensor, nn


class PairwiseDots(nn.Module):
    """Computes v_i . v_j of all pairs i > j, in the order of i, then j."""

    pair: Tensor
    place_FF: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        # On the CPU whatever the default: on the meta device, where a model that is loaded is built
        # first, torch takes ten milliseconds to compute these in Python.
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1, device="cpu")
        pairs = torch.arange(row.numel(), device="cpu")
        # The pair at each place of the matrix of all dots; one past the last on its diagonal.
        place_FF = torch.full((num_vectors, num_vectors), row.numel(), device="cpu")
        place_FF[row, column] = place_FF[column, row] = pairs
        # Not for checkpoints: they follow from the number of vectors.
        self.register_buffer("pair", row * num_vectors + column, persistent=False)
        self.register_buffer("place_FF", place_FF.flatten(), persistent=False)

    def forward(self, vectors_NFD: Tensor) -> Tensor:
        """Return the dots of all pairs: [N, F, D] -> [N, pairs]."""
        device = vectors_NFD.device.type
        if torch.is_autocast_enabled(device):
            # Cast before, not inside: the derivative multiplies by the vectors.
            vectors_NFD = vectors_NFD.to(torch.get_autocast_dtype(device))
        dots: Tensor = _Dots.apply(vectors_NFD, self.pair, self.place_FF)
        return dots


class _Dots(torch.autograd.Function):
    # torch's derivative of `products[:, row, column]` adds one value after the other to a cleared
    # matrix a row. With the gradient g of the pairs as a symmetric matrix G of zero diagonal, that
    # of the vectors V is G V: a gather and one product. A MAML step of DLRM takes four fifths of
    # the time with 26 features, nine tenths with the demo's.
    generate_vmap_rule = True

    @staticmethod
    def forward(vectors_NFD: Tensor, pair: Tensor, place_FF: Tensor) -> Tensor:
        return _pairs(torch.bmm(vectors_NFD, vectors_NFD.mT), pair)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        vectors_NFD, pair, place_FF = ctx.saved_tensors
        return _SpreadPairs.apply(grads[0], vectors_NFD, pair, place_FF), None, None


class _SpreadPairs(torch.autograd.Function):
    """Computes G V."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, vectors_NFD: Tensor, pair: Tensor, place_FF: Tensor) -> Tensor:
        num_rows, num_vectors, _ = vectors_NFD.shape
        # One more pair, whose gradient is 0: the diagonal takes its place.
        with_zero = torch.cat([grad, grad.new_zeros(num_rows, 1)], dim=1)
        symmetric_NFF = with_zero.index_select(1, place_FF).view(-1, num_vectors, num_vectors)
        # d(sum_p g_p v_i . v_j)/dv_i = sum_j G_ij v_j: each pair counts once in the row of either.
        return torch.bmm(symmetric_NFF, vectors_NFD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient U of G V gives G U to V, and U V^T and its transpose at the pairs to g.
        grad, vectors_NFD, pair, place_FF = ctx.saved_tensors
        of_pairs, of_vectors, _, _ = ctx.needs_input_grad
        return (
            _Crossed.apply(grads[0], vectors_NFD, pair, place_FF) if of_pairs else None,
            _SpreadPairs.apply(grad, grads[0], pair, place_FF) if of_vectors else None,
            None,
            None,
        )


class _Crossed(torch.autograd.Function):
    """Computes u_i . v_j + u_j . v_i of all pairs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(other_NFD: Tensor, vectors_NFD: Tensor, pair: Tensor, place_FF: Tensor) -> Tensor:
        products_NFF, num_vectors = torch.bmm(other_NFD, vectors_NFD.mT), other_NFD.shape[1]
        # Of the pair (i, j), the place of (j, i).
        mirrored = pair % num_vectors * num_vectors + pair // num_vectors
        return _pairs(products_NFF, pair) + _pairs(products_NFF, mirrored)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        other_NFD, vectors_NFD, pair, place_FF = ctx.saved_tensors
        of_other, of_vectors, _, _ = ctx.needs_input_grad
        return (
            _SpreadPairs.apply(grads[0], vectors_NFD, pair, place_FF) if of_other else None,
            _SpreadPairs.apply(grads[0], other_NFD, pair, place_FF) if of_vectors else None,
            None,
            None,
        )


def _pairs(products_NFF: Tensor, pair: Tensor) -> Tensor:
    return products_NFF.flatten(1).index_select(1, pair)
