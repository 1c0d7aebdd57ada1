"""The multilayer perceptron that all models share."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int], activate_last: bool) -> nn.Sequential:
    """Return linear layers of these widths, from input to output, with ReLU between them and, if
    asked, at the end.
    """
    layers: list[nn.Module] = []
    for index, (width_in, width_out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width_in, width_out))
        if activate_last or index + 2 < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
