"""The models by name; adding one is a file beside this one, a line in MODELS and a test."""

from collections.abc import Callable

import torch
from torch import nn

from gmeta_models.cbml import CBML
from gmeta_models.config import InputSizes, ModelConfig
from gmeta_models.din import DIN
from gmeta_models.dlrm import DLRM
from gmeta_models.gated import row_layers
from gmeta_models.melu import MeLU

MODELS: dict[str, Callable[[ModelConfig, InputSizes], nn.Module]] = {
    "cbml": CBML,
    "din": DIN,
    "dlrm": DLRM,
    "melu": MeLU,
}


def build_model(config: ModelConfig, sizes: InputSizes) -> nn.Module:
    """Return the model `config.name`, freshly initialised from torch's global generator.

    Raises:
        ValueError: the name is unknown, or the data has no column at all that the model could read.
    """
    if config.name not in MODELS:
        raise ValueError(
            f"model.name = {config.name!r} is unknown: known are {', '.join(sorted(MODELS))}. "
            "Choose one of them, or register yours in models/gmeta_models/registry.py"
        )
    if sizes.num_single + sizes.num_multi == 0:
        raise ValueError(
            "the dataset has 0 sparse columns: a model needs at least one. "
            "Add a [[single]] or [[multi]] column to the schema and prepare again"
        )
    model = MODELS[config.name](config, sizes)
    with torch.no_grad():
        # Added to torch's draw, so that a bias of 0 changes nothing.
        head(model).bias.add_(config.output_bias)
    return model


def head(model: nn.Module) -> nn.Linear:
    """Return the layer that gives a row's output: the last linear one that works on rows."""
    return list(row_layers(model).values())[-1]
