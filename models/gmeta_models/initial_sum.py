"""Fresh decision layers whose output is a known weighted sum of some inputs at the start."""

from collections.abc import Mapping

import torch
from torch import nn

from gmeta_models.decision_model import DecisionModel
from gmeta_models.mlp import DropoutReLU


def start_as_sum(model: nn.Module, weight_of: Mapping[int, float], bias: float) -> None:
    """Make the decision layers' output `bias` plus the dense columns at these places times their
    weights; the last column has place -1. Raises ValueError: the layers do not see dense columns as
    they are, or one has a single unit."""
    layers = []
    if isinstance(model, DecisionModel) and model.sees_dense_last:
        layers = [each for each in model.decision_layers if isinstance(each, nn.Linear)]
    if not layers or any(each.out_features < 2 for each in layers[:-1]):
        raise ValueError(
            "support_features.bias_start: a layer has a single unit, or the first does not take "
            "dense columns as they are. Choose melu or din, and two units or more in "
            "model.hidden, or leave it out"
        )
    # Two units of each hidden layer carry the sum and its negative through the ReLUs; the others
    # are as drawn, but the output has no weight for them until it learns one.
    for part in model.modules():
        if isinstance(part, DropoutReLU):
            part.kept = 2  # a sum that is left out now and then would be noise
    with torch.no_grad():
        _only_inputs(layers[0], weight_of, is_last=len(layers) == 1)
        for layer in layers[1:]:
            is_last = layer is layers[-1]
            layer.weight[: 1 if is_last else 2] = 0.0
            if is_last:
                # relu(s) - relu(-s) = s.
                layer.weight[0, 0], layer.weight[0, 1] = 1.0, -1.0
            else:
                layer.weight[0, 0] = layer.weight[1, 1] = 1.0
                layer.bias[:2] = 0.0
        layers[-1].bias.fill_(bias)


def _only_inputs(layer: nn.Linear, weight_of: Mapping[int, float], is_last: bool) -> None:
    signs = (1.0,) if is_last else (1.0, -1.0)
    for unit, sign in enumerate(signs):
        layer.weight[unit] = 0.0
        layer.bias[unit] = 0.0
        for place, weight in weight_of.items():
            layer.weight[unit, place] = sign * weight
