"""A linear layer on many rows, by the products of products.py.

Shape suffixes: N rows, I input width, O output width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.products import first_piece, over_rows, times


class RowLinear(nn.Linear):
    """torch's linear layer, faster where products.py is; differentiable any number of times."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        rows_NI = input.flatten(0, -2) if input.dim() > 2 else input
        if (
            rows_NI.dim() != 2
            or not first_piece(rows_NI, self.out_features)
            # torch.func takes no Function whose forward gets the context, and autocast
            # chooses the type of numbers for layers of torch alone.
            or torch.is_autocast_enabled("cpu")
            or torch._C._are_functorch_transforms_active()
        ):
            return super().forward(input)
        rows_NO: Tensor = _Rows.apply(rows_NI, self.weight, self.bias)
        return rows_NO.view(*input.shape[:-1], self.out_features)


class _Rows(torch.autograd.Function):
    """rows W^T + b."""

    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """[N, I] -> [N, O]."""
        ctx.save_for_backward(rows_NI, weight_OI)
        return times(rows_NI, weight_OI.mT, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """By Functions again, so that this can be differentiated too."""
        rows_NI, weight_OI = ctx.saved_tensors
        # The gradient of a sum is one number with strides of 0.
        grad_NO = grads[0].contiguous()
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            _Rows.apply(grad_NO, weight_OI.mT, None) if of_rows else None,
            _OverRows.apply(grad_NO, rows_NI) if of_weight else None,
            grad_NO.sum(dim=0) if of_bias else None,
        )


class _OverRows(torch.autograd.Function):
    """left^T right."""

    @staticmethod
    def forward(ctx: Any, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        ctx.save_for_backward(left_NO, right_NI)
        return over_rows(left_NO, right_NI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        left_NO, right_NI = ctx.saved_tensors
        (grad_OI,) = grads
        of_left, of_right = ctx.needs_input_grad
        return (
            _Rows.apply(right_NI, grad_OI, None) if of_left else None,
            _Rows.apply(left_NO, grad_OI.mT, None) if of_right else None,
        )
