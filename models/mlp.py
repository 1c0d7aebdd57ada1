"""The multilayer perceptron that all models share."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from models.linear import RowLinear


def mlp(widths: Sequence[int], activate_last: bool) -> nn.Sequential:
    """Linear layers with ReLU between them: `widths` from input to output, ReLU at the end if
    asked.
    """
    layers: list[nn.Module] = []
    for index, (width_in, width_out) in enumerate(pairwise(widths)):
        layers.append(RowLinear(width_in, width_out))
        if activate_last or index + 2 < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
