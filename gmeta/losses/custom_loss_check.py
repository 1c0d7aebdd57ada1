"""Tries a loss of another package on a few rows, before a run learns by it.

Shape suffix: N rows"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gmeta.errors import ConfigError
from gmeta.losses.row_losses import LossFunction, curvatures_N, row_grads_N, row_losses_N
from gmeta_keys.translate_errors import format_foreign_error, translate_errors

if TYPE_CHECKING:
    from gmeta.config.losses import CustomLoss


def check_custom_loss(name: str, own: CustomLoss) -> None:
    """Raise ConfigError for a loss that is not one of each row alone, with finite derivatives."""

    def refuse(problem: str, remedy: str) -> ConfigError:
        return ConfigError(f"the loss {name!r} {problem}. {remedy} (docs/extending.md)")

    def check(values: object, what: str) -> None:
        made = f"of shape {list(values.shape)}" if isinstance(values, Tensor) else repr(values)
        if not isinstance(values, Tensor) or values.shape != output_N.shape:
            rows = len(output_N)
            raise refuse(f"makes {what} {made} of {rows} rows", f"Return a tensor of [{rows}]")
        if not values.isfinite().all():
            at = int((~values.isfinite()).int().argmax())
            where = f"the output {output_N[at]:g} and the label {label_N[at]:g}"
            raise refuse(f"makes {what} {values[at]:g} for {where}", "Make it finite there")

    loss = LossFunction("", own=own)
    # A label of 0 stands where none is known, whatever the labels are.
    grid_N = torch.linspace(-8.0, 8.0, 9, device="cpu")
    output_N = grid_N.repeat(2).requires_grad_()
    label_N = torch.cat([torch.zeros_like(grid_N), torch.ones_like(grid_N)])
    remedy = "Make it of torch operations that can be differentiated twice"
    failed = translate_errors(
        lambda error: refuse(f"fails: {format_foreign_error(error)}", remedy), ConfigError
    )
    with torch.device("cpu"), torch.enable_grad(), failed:
        check(own.function(output_N, label_N), "losses")
        if not (losses_N := row_losses_N(loss, output_N, label_N)).requires_grad:
            raise refuse("has no gradient", "Leave out .detach(), .item() and torch.no_grad()")
        other_N = torch.cat([output_N[:-1], output_N[-1:] + 1.0])
        if not torch.allclose(row_losses_N(loss, other_N, label_N)[:-1], losses_N[:-1]):
            raise refuse("of a row changes with other rows", "Make it of each row alone")
        check(row_grads_N(loss, output_N, label_N), "slopes")
        check(curve_N := curvatures_N(loss, output_N, label_N), "curvatures")
        if (curve_N < 0).any():
            raise refuse(f"makes the curvature {curve_N.min():g}", "Return none below 0")
