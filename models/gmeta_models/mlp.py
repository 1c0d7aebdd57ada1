"""The multilayer perceptron that all models share.

Shape suffixes: N rows, O outputs"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


def mlp(widths: Sequence[int], activate_last: bool) -> nn.Sequential:
    """Return linear layers of these widths, from input to output, with ReLU between them, and at
    the end if `activate_last`."""
    layers: list[nn.Module] = []
    for index, (width_in, width_out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width_in, width_out))
        if activate_last or index + 2 < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def is_mlp(layers: nn.Module, activate_last: bool) -> bool:
    """Tell whether layers are as `mlp` returns them, with nothing else between them."""
    if type(layers) is not nn.Sequential:
        return False
    kinds = [type(layer) for layer in layers]
    num_linear = kinds.count(nn.Linear)
    wanted = [nn.Linear, nn.ReLU] * num_linear
    return kinds == (wanted if activate_last else wanted[:-1])


def outputs_of_rows(output_NO: Tensor) -> Tensor:
    """Return a model's outputs as its callers take them: [N] of one output a row, else [N, O]."""
    return output_NO.squeeze(1) if output_NO.shape[1] == 1 else output_NO
