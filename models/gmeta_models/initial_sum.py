"""Fresh decision layers whose output is a known weighted sum of the dense columns at the start."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from gmeta_models.decision_model import DecisionModel
from gmeta_models.mlp import DropoutReLU


def list_sum_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers that can carry a sum of dense columns to the output. Raises ValueError: the
    layers do not see dense columns as they are, or one has a single unit."""
    layers = []
    if isinstance(model, DecisionModel) and model.sees_dense_last:
        layers = [each for each in model.decision_layers if isinstance(each, nn.Linear)]
    if not layers or any(each.out_features < 2 for each in layers[:-1]):
        raise ValueError(
            "model.linear_start: a layer has a single unit, or the first does not take dense "
            "columns as they are. Choose melu or din, and two units or more in model.hidden, or "
            "leave it out"
        )
    return layers


def keep_sum_units(model: nn.Module) -> None:
    """Exempt from dropout the units that carry a sum: without them it would be noise."""
    for part in model.modules():
        if isinstance(part, DropoutReLU):
            part.kept = 2


@torch.no_grad()
def start_as_sum(layers: list[nn.Linear], weight_K: Tensor, bias: float) -> None:
    """Make the output of these layers `bias` plus the dense columns times their weights."""
    first, last = layers[0], layers[-1]
    # Two units of each hidden layer carry the sum and its negative through the ReLUs; the others
    # are as drawn, but the output has no weight for them until it learns one.
    for unit, sign in enumerate((1.0,) if first is last else (1.0, -1.0)):
        first.weight[unit] = first.bias[unit] = 0.0
        first.weight[unit, first.in_features - len(weight_K) :] = sign * weight_K.to(first.weight)
    for _, layer in pairwise(layers):
        if layer is last:
            # relu(s) - relu(-s) = s.
            layer.weight[0] = 0.0
            layer.weight[0, 0], layer.weight[0, 1] = 1.0, -1.0
        else:
            layer.weight[:2] = layer.bias[:2] = 0.0
            layer.weight[0, 0] = layer.weight[1, 1] = 1.0
    last.bias.fill_(bias)
