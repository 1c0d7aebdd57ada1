"""Evaluation mode around predictions."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Keep a model in eval mode inside."""
    # A model of another package may have dropout. Parts in eval mode before stay so afterwards.
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
