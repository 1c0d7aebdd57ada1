"""The losses of rows by name: ours, and a package's own by entry point or import path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from gmeta.errors import ConfigError, is_of_memory
from gmeta_keys.plugins import Registry
from gmeta_keys.translate_errors import format_foreign_error, translate_errors

if TYPE_CHECKING:
    from torch import Tensor

Loss: TypeAlias = Literal["bce", "mse", "huber", "mae", "softmax", "pairwise"]
LOSSES = get_args(Loss)
# As row_losses.defined_labels_N has them, without torch; other losses take every finite number.
RANGES = {"bce": (0.0, 1.0), "softmax": (0.0, math.inf)}
RowFunction: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


@dataclass(frozen=True)
class CustomLoss:
    """A loss of one's own: `function(output_N, label_N)` returns that of each row, by torch
    operations that can be differentiated twice. It is called with the label 0 where none is known.

    Of labels from 0 to 1 a model `predicts` a probability, whose logit its output is; else a
    rating, which its output is. `curvature`, a function of the same arguments, returns the second
    derivatives by the output, at least 0, for algorithms that solve a step; without it they are
    autograd's, and 0 where those are below."""

    function: RowFunction
    predicts: Literal["probability", "rating"]
    curvature: RowFunction | None = None

    def call(self, function: RowFunction, output_N: Tensor, label_N: Tensor) -> Tensor:
        """Return what one of the functions makes of outputs and labels, in their shape. Raises
        ConfigError: it fails."""

        def translate(error: Exception) -> Exception:
            if is_of_memory(error):
                return error
            name = getattr(function, "__qualname__", type(function).__name__)
            message = f"{name} of outer.loss fails: {format_foreign_error(error)}"
            return ConfigError(f"{message}. Mend it; --verbose shows the line")

        # As rows alone, whatever the shape: several labels may share the function.
        with translate_errors(translate):
            made_N = function(output_N.flatten(), label_N.flatten())
        return made_N.view(output_N.shape)


NAMED_LOSSES: Registry[CustomLoss | None] = Registry(
    "outer.loss",
    "gmeta.losses",
    dict.fromkeys(LOSSES),
    "a value of gmeta.config.losses.CustomLoss",
    lambda found: isinstance(found, CustomLoss) and found.predicts in ("probability", "rating"),
)


def find_custom_loss(name: str) -> CustomLoss | None:
    """Return the loss of another package; None for one of ours. Raises ConfigError: it is unknown,
    or cannot be imported."""
    try:
        return NAMED_LOSSES.find(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def kind_of_loss(name: str) -> Loss:
    """Return the loss of ours whose labels and predictions are alike: of one of ours itself."""
    own = find_custom_loss(name)
    if own is None:
        return cast(Loss, name)
    return "bce" if own.predicts == "probability" else "mse"
