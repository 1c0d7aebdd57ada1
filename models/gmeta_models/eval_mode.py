"""The mode of a model that is only asked for predictions."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Keep a model in eval mode inside, as when it is served: one of somebody's own may have
    dropout. A part that its owner put in eval mode stays so afterwards."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
