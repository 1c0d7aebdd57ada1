"""Recommendation models as plain torch modules: no process groups, no files, no adaptation."""

import importlib
from typing import TYPE_CHECKING, Any

from gmeta_models.model_config import InputSizes, ModelConfig, SparseColumn

if TYPE_CHECKING:
    from gmeta_models.inputs import RowInputs
    from gmeta_models.registry import MODELS, build_model

__all__ = ["MODELS", "InputSizes", "ModelConfig", "RowInputs", "SparseColumn", "build_model"]

_TORCH = {
    "MODELS": "gmeta_models.registry",
    "build_model": "gmeta_models.registry",
    "RowInputs": "gmeta_models.inputs",
}


def __getattr__(name: str) -> Any:
    """Return what needs torch, imported at its first use."""
    # The package alone loads no torch: a config is checked without waiting for it.
    if name not in _TORCH:
        raise AttributeError(f"module 'gmeta_models' has no attribute {name!r}")
    return getattr(importlib.import_module(_TORCH[name]), name)
