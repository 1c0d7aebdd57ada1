"""The multilayer perceptron that all models share.

Shape suffixes: N rows, O outputs"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class DropoutReLU(nn.ReLU):
    """ReLU that leaves out each unit of a row with chance `share` while `drop_units` says so."""

    # In the place of a ReLU, so that layers have the same names with dropout and without.
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.kept = 0  # the first units that always stay: start_as_sum
        self.is_dropping = False

    def forward(self, input: Tensor) -> Tensor:
        """Return max(x, 0), or while units are left out, that of the others / (1 - share)."""
        hidden: Tensor = super().forward(input)
        return self.drop_out(hidden) if self.is_dropping else hidden

    def drop_out(self, hidden: Tensor) -> Tensor:
        """Return hidden units, some of each row 0, the others divided by the share that stays."""
        dropped = F.dropout(hidden, self.share)
        if self.kept:
            dropped[..., : self.kept] = hidden[..., : self.kept]
        return dropped


@contextmanager
def drop_units(model: nn.Module) -> Iterator[None]:
    """Have a model in training mode leave units out, inside; one in eval mode has them all."""
    # By hand, not by the mode alone: a training step's inner steps have all units, too.
    parts = [part for part in model.modules() if isinstance(part, DropoutReLU) and part.training]
    for part in parts:
        part.is_dropping = True
    try:
        yield
    finally:
        for part in parts:
            part.is_dropping = False


def dropout_of(layers: nn.Sequential) -> DropoutReLU | None:
    """Return what leaves units of layers of `mlp` out, alike behind each; None: nothing does."""
    return next((part for part in layers if isinstance(part, DropoutReLU)), None)


def mlp(widths: Sequence[int], activate_last: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers of these widths, from input to output, with ReLU between them, and at
    the end if `activate_last`; behind each ReLU `dropout`, see drop_units."""
    layers: list[nn.Module] = []
    for index, (width_in, width_out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width_in, width_out))
        if activate_last or index + 2 < len(widths):
            layers.append(DropoutReLU(dropout) if dropout else nn.ReLU())
    return nn.Sequential(*layers)


def is_mlp(layers: nn.Module, activate_last: bool = False) -> bool:
    """Tell whether layers are as `mlp` returns them, with nothing else between them."""
    # A subclass may do anything in its forward pass.
    if type(layers) is not nn.Sequential:
        return False
    kinds = [nn.ReLU if type(layer) is DropoutReLU else type(layer) for layer in layers]
    num_linear = kinds.count(nn.Linear)
    wanted = [nn.Linear, nn.ReLU] * num_linear
    return kinds == (wanted if activate_last else wanted[:-1])


def outputs_of_rows(output_NO: Tensor) -> Tensor:
    """Return a model's outputs as its callers take them: [N] of one output a row, else [N, O]."""
    return output_NO.squeeze(1) if output_NO.shape[1] == 1 else output_NO
